// What of a GPU's memory the buffers of a plan may take.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "policy/plan.h"

namespace slidedp::policy {

// What is in use of a GPU beside the buffers of policy::DeviceBuffers: an upper
// bound, because no library tells it beforehand. In parts:
// - CUDA's context and the kernels of cuBLAS, cuDNN and our own that a job uses
//   (measured: 0.59 to 0.66 GiB; all kernels are 0.4 GiB more);
// - each communicator's channels, and the memory that GPUs which reach each
//   other write directly, with more than one rank;
// - the ops' workspace: the attention's backward pass, float32 copies of
//   weights (`float32`), and the matrix products' own.
inline constexpr uint64_t kGpuContextBytes = uint64_t{1280} << 20;
inline constexpr uint64_t kGpuCommunicatorBytes = uint64_t{512} << 20;
std::vector<NamedBytes> GpuAllowance(const Problem& problem);

// Problem::device_memory_bytes for a GPU of `gpu_bytes`, of which
// problem.gpu_memory_limit_bytes (0: all) may be in use. An error if the
// allowance leaves nothing.
absl::StatusOr<uint64_t> GpuBufferBytes(const Problem& problem,
                                        uint64_t gpu_bytes);

// Without host memory ("pinned.").
uint64_t GpuBytes(const std::vector<NamedBytes>& device_buffers);

}  // namespace slidedp::policy
