#include "policy/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace slidedp::policy {

double LrFactor(const LrSchedule& schedule, uint64_t step) {
  const double s = static_cast<double>(step);
  const double warmup = static_cast<double>(schedule.warmup_steps);
  if (step < schedule.warmup_steps) return s / std::max(1.0, warmup);
  // Updates after warm-up; at least 1, as transformers has it.
  const double total = static_cast<double>(schedule.total_steps);
  const double span = std::max(1.0, total - warmup);
  switch (schedule.kind) {
    case LrScheduleKind::kConstant:
      return 1.0;
    case LrScheduleKind::kLinear:
      return std::max(0.0, (total - s) / span);
    case LrScheduleKind::kCosine: {
      const double cosine = std::max(
          0.0, 0.5 * (1.0 + std::cos(std::numbers::pi * (s - warmup) / span)));
      return schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * cosine;
    }
  }
  return 1.0;
}

}  // namespace slidedp::policy
