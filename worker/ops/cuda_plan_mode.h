// How CUDA ops that choose among algorithms do so at a shape they have not
// seen.
#pragma once

namespace slidedp::ops {

enum class PlanMode {
  // The library's first choice; results are right from the first call.
  kFirstChoice,
  // Candidates are timed on the operands given: outputs are undefined.
  kTimed,
  // An error. Steps run in this mode: planning allocates, loads kernels and
  // waits for the device.
  kFrozen,
};

}  // namespace slidedp::ops
