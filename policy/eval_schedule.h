// When a job is evaluated, as daemon and workers must agree.
#pragma once

#include <cstdint>

namespace slidedp::policy {

// After `step` updates, in a run of the steps [first, end) of a job: before the
// first step, after every `every_steps` (0: not in between), after the last.
inline bool EvaluationIsDue(uint64_t step, uint64_t first, uint64_t end,
                            uint64_t every_steps) {
  return step == first || step == end ||
         (every_steps > 0 && step % every_steps == 0);
}

}  // namespace slidedp::policy
