// Learning-rate schedules, as transformers defines them (models.md section 7).
#pragma once

#include <cstdint>

namespace slidedp::policy {

enum class LrScheduleKind { kLinear, kConstant, kCosine };

struct LrSchedule {
  LrScheduleKind kind = LrScheduleKind::kLinear;
  uint64_t warmup_steps = 0;
  uint64_t total_steps = 0;
  double min_lr_ratio = 0;  // cosine only: the floor, as a share of the peak
};

// Factor on the base learning rate of the update number `step` (0-based: the
// first update uses step 0).
double LrFactor(const LrSchedule& schedule, uint64_t step);

}  // namespace slidedp::policy
