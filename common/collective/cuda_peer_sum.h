// The sum of a PeerCollective's reduce-scatter. Private to this folder.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "absl/status/status.h"
#include "common/collective/collective.h"

namespace slidedp::collective {

// What the other ranks sent: those before this rank, then those after it, each
// `stride_bytes` (a multiple of 16) from the one before; 16-byte aligned.
struct StagedPieces {
  const void* first;
  size_t stride_bytes;
  int ranks;  // all, this one included
  int rank;
};

// own[i] = the sum over the ranks, in their order, for i < count.
absl::Status LaunchPeerSum(void* own, size_t count, DType dtype,
                           const StagedPieces& staged, cudaStream_t stream);
// Loads the kernels.
absl::Status PreparePeerSum();

}  // namespace slidedp::collective
