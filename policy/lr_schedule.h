// Learning-rate schedules, as transformers defines them (models.md section 7).
#pragma once

#include <cstdint>

namespace slidedp::policy {

enum class LrScheduleKind {
  kLinear,
  kConstant,
  kCosine,
  kWsd,  // warm-up, stable, decay
};
// The decay of kWsd.
enum class LrDecay { kCosine, kLinear, kOneMinusSqrt };

struct LrSchedule {
  LrScheduleKind kind = LrScheduleKind::kLinear;
  uint64_t warmup_steps = 0;
  uint64_t total_steps = 0;
  // The floor, as a share of the peak. kCosine and kWsd only; kWsd begins its
  // warm-up there too.
  double min_lr_ratio = 0;
  // kWsd only: the last so many steps.
  uint64_t decay_steps = 0;
  LrDecay decay = LrDecay::kCosine;
};

// Factor on the base learning rate of the update number `step` (0-based: the
// first update uses step 0).
double LrFactor(const LrSchedule& schedule, uint64_t step);

}  // namespace slidedp::policy
