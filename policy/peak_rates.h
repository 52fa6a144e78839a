// What GPUs can multiply at best: the denominator of an MFU.
#pragma once

#include "absl/strings/string_view.h"

namespace slidedp::policy {

// Dense BF16 FLOP/s with float32 sums, as NVIDIA's data sheets and architecture
// papers state them, of the GPU that a worker's description names; 0 if it is
// not in the table.
double PeakBf16FlopsPerSecond(absl::string_view description);

}  // namespace slidedp::policy
