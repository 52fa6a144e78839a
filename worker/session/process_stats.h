// What the kernel says of this process.
#pragma once

#include <cstdint>

namespace slidedp::session {

// Proportional set size from /proc/self/smaps_rollup: shared pages count once
// over all of their users. 0 if the kernel does not say.
uint64_t PssBytes();

// CPUs that this process may run on.
uint32_t AllowedCpus();

}  // namespace slidedp::session
