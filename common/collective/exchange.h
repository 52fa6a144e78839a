// Sizes of what ranks exchange data through. Constant expressions, so that
// planning needs no device.
#pragma once

#include <algorithm>
#include <cstddef>

#include "common/base/units.h"

namespace slidedp::collective {

// One staging buffer: whole cache lines, at least one for each rank.
constexpr size_t ExchangeBufferBytes(int world_size,
                                     size_t staging_bytes_per_rank) {
  return std::max<size_t>(AlignUp(staging_bytes_per_rank, kCacheLineBytes),
                          kCacheLineBytes * static_cast<size_t>(world_size));
}

// A header, one line of words per rank, and two staging buffers of
// `staging_bytes_per_rank` for each rank; whole pages.
constexpr size_t ExchangeBytes(int world_size, size_t staging_bytes_per_rank) {
  const size_t ranks = static_cast<size_t>(world_size);
  return AlignUp(
      kCacheLineBytes * (1 + ranks) +
          2 * ranks * ExchangeBufferBytes(world_size, staging_bytes_per_rank),
      kPageBytes);
}

// Device memory of a rank that other GPUs write (cuda_peer_collective.h): of
// the collective that gathers parameters, and of the one that reduces
// gradients. A sum is a kernel beside compute and waits for room there, so it
// goes over few large pieces.
inline constexpr size_t kParamStagingBytes = size_t{64} << 20;
inline constexpr size_t kGradStagingBytes = size_t{256} << 20;

}  // namespace slidedp::collective
