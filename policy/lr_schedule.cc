#include "policy/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace slidedp::policy {
namespace {

// From 1 at progress 0 to 0 at progress 1.
double Shape(LrDecay decay, double progress) {
  switch (decay) {
    case LrDecay::kLinear:
      return 1.0 - progress;
    case LrDecay::kOneMinusSqrt:
      return 1.0 - std::sqrt(progress);
    case LrDecay::kCosine:
      break;
  }
  return 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
}

}  // namespace

double LrFactor(const LrSchedule& schedule, uint64_t step) {
  const double s = static_cast<double>(step);
  const double warmup = static_cast<double>(schedule.warmup_steps);
  const double total = static_cast<double>(schedule.total_steps);
  const double floor = schedule.min_lr_ratio;
  const auto above_floor = [&](double factor) {
    return std::max(0.0, factor * (1.0 - floor) + floor);
  };
  if (step < schedule.warmup_steps) {
    const double progress = s / std::max(1.0, warmup);
    return schedule.kind == LrScheduleKind::kWsd ? above_floor(progress)
                                                 : progress;
  }
  // Updates after warm-up; at least 1, as transformers has it.
  const double span = std::max(1.0, total - warmup);
  switch (schedule.kind) {
    case LrScheduleKind::kConstant:
      return 1.0;
    case LrScheduleKind::kLinear:
      return std::max(0.0, (total - s) / span);
    case LrScheduleKind::kCosine:
      return above_floor(Shape(LrDecay::kCosine, (s - warmup) / span));
    case LrScheduleKind::kWsd: {
      const double decay_steps = static_cast<double>(schedule.decay_steps);
      const double decayed = s - (total - decay_steps);
      if (decayed < 0) return 1.0;
      if (decayed >= decay_steps) return floor;
      return above_floor(Shape(schedule.decay, decayed / decay_steps));
    }
  }
  return 1.0;
}

}  // namespace slidedp::policy
