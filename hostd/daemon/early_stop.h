// Which evaluation was the best, and whether a job still gets better.
#pragma once

#include <cstdint>
#include <optional>

#include "common/checkpoint/manifest.h"

namespace slidedp::hostd {

class EarlyStop {
 public:
  // `patience`: evaluations in a row that were not lower than the lowest before
  // them less `min_delta`, after which there is no point in going on; 0: no
  // limit. A loss that is not finite is not lower.
  EarlyStop(uint64_t patience, double min_delta)
      : patience_(patience), min_delta_(min_delta) {}

  // The evaluation after `step` steps. True: the lowest so far.
  bool Add(uint64_t step, double loss);
  bool should_stop() const { return patience_ > 0 && since_ >= patience_; }

  // Its part of what a checkpoint holds.
  void Save(checkpoint::Memory& memory) const;
  void Restore(const checkpoint::Memory& memory);

  std::optional<double> best_loss() const { return best_loss_; }
  uint64_t best_step() const { return best_step_; }
  uint64_t since_better() const { return since_; }

 private:
  const uint64_t patience_;
  const double min_delta_;
  std::optional<double> best_loss_;
  uint64_t best_step_ = 0;
  // What patience counts from: the lowest loss that was lower by min_delta.
  std::optional<double> mark_;
  uint64_t since_ = 0;
};

}  // namespace slidedp::hostd
