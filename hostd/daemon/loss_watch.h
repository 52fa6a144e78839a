// Tells which losses stand out: above the mean of the last kWindow losses by
// more than `sigma` of their standard deviations. The deviation is taken as at
// least kLeastDeviation of the mean, so that a flat curve's noise is not news.
// Nothing is said before kLeast losses. A loss that stood out counts like any
// other afterwards: a curve that has moved for good is reported for a while
// only.
#pragma once

#include <cstddef>
#include <deque>
#include <optional>

#include "common/checkpoint/manifest.h"

namespace slidedp::hostd {

class LossWatch {
 public:
  static constexpr size_t kWindow = checkpoint::Memory::kMaxLosses;
  static constexpr size_t kLeast = 16;
  static constexpr double kLeastDeviation = 1e-3;

  struct Spike {
    double mean, deviation;
  };

  // 0: never.
  explicit LossWatch(double sigma) : sigma_(sigma) {}
  // The next loss; one that is not finite is passed over.
  std::optional<Spike> Add(double loss);
  // The oldest first.
  const std::deque<double>& last() const { return last_; }

 private:
  const double sigma_;
  std::deque<double> last_;
};

}  // namespace slidedp::hostd
