// What the kernel says of this process.
#pragma once

#include <cstdint>

namespace slidedp::session {

// CPUs that this process may run on.
uint32_t AllowedCpus();

}  // namespace slidedp::session
