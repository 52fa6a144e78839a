// When a job is evaluated, as daemon and workers must agree.
#pragma once

#include <cstdint>

namespace slidedp::policy {

// After `step` of `end` steps of a job: before the first, after every
// `every_steps` (0: not in between), after the last. Where a run of it begins
// makes no difference: early stop counts evaluations.
inline bool EvaluationIsDue(uint64_t step, uint64_t end, uint64_t every_steps) {
  return step == 0 || step == end ||
         (every_steps > 0 && step % every_steps == 0);
}

}  // namespace slidedp::policy
