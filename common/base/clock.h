// The one clock of all processes of a host: CLOCK_MONOTONIC.
#pragma once

#include <cstdint>

namespace slidedp {
int64_t MonotonicNs();
int64_t UnixMicros();  // wall clock, for people and records only
}  // namespace slidedp
