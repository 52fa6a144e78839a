#include "hostd/daemon/loss_watch.h"

#include <algorithm>
#include <cmath>

namespace slidedp::hostd {

std::optional<LossWatch::Spike> LossWatch::Add(double loss) {
  if (!std::isfinite(loss)) return std::nullopt;
  std::optional<Spike> spike;
  if (sigma_ > 0 && last_.size() >= kLeast) {
    const auto count = static_cast<double>(last_.size());
    double mean = 0, square = 0;
    for (double each : last_) mean += each / count;
    for (double each : last_) square += (each - mean) * (each - mean) / count;
    const double deviation =
        std::max(std::sqrt(square), kLeastDeviation * std::abs(mean));
    if (loss > mean + sigma_ * deviation) spike = Spike{mean, deviation};
  }
  last_.push_back(loss);
  if (last_.size() > kWindow) last_.pop_front();
  return spike;
}

}  // namespace slidedp::hostd
