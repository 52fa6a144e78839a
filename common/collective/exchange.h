// Size of the shared region through which CPU ranks exchange data. A constant
// expression, so that planning needs no device.
#pragma once

#include <cstddef>

#include "common/base/units.h"

namespace slidedp::collective {

// A header, one line of words per rank, and two staging buffers of
// `staging_bytes_per_rank` for each rank.
constexpr size_t ExchangeBytes(int world_size, size_t staging_bytes_per_rank) {
  return AlignUp(kCacheLineBytes * (1 + 4 * static_cast<size_t>(world_size)) +
                     2 * world_size *
                         AlignUp(staging_bytes_per_rank, kCacheLineBytes),
                 kPageBytes);
}

}  // namespace slidedp::collective
