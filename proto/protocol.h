// The version of what control.proto describes. slidedpctl, slidedp-worker and
// slidedpd of one release have the same; a daemon refuses a worker of another.
#pragma once

#include <cstddef>
#include <cstdint>

namespace slidedp {
inline constexpr uint32_t kProtocolVersion = 1;
// Of each of CollectiveIds' ids.
inline constexpr size_t kCollectiveIdBytes = 128;
}  // namespace slidedp
