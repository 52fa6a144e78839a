// The GPU of a worker, whatever this build supports: one implementation for
// builds with CUDA, one for builds without, chosen by CMake.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/device/device.h"

namespace slidedp::device {

bool AcceleratorIsBuilt();

// What must be set before the process's first thread and GPU call; from main.
void PrepareAcceleratorProcess();

struct AcceleratorInfo {
  std::string name;  // "NVIDIA H200 (sm_90)"
  std::string uuid;  // as CUDA_VISIBLE_DEVICES takes it
  uint64_t memory_bytes = 0;
  int numa_node = -1;  // of the host; -1: unknown
  // Whether it reads and writes every other visible GPU's memory by itself.
  bool reaches_others = true;
};
// The GPUs that this process sees, in its numbering; none without a driver or
// without CUDA in this build. Uses none of them. A driver that is there and
// does not work is an error.
//
// SLIDEDP_RANKS_PER_GPU=N in the environment: each N times, one after all
// others, with an Nth of its memory, so that tests of several ranks run on one
// GPU. NCCL can do that since 2.30.
absl::StatusOr<std::vector<AcceleratorInfo>> ListAccelerators();

struct AcceleratorOptions {
  // Of this worker on this host. With one visible GPU (Slurm and containers
  // hand out one each) it is that GPU, else the one of this number in
  // ListAccelerators.
  int rank = 0;
  size_t memory_limit_bytes = 0;  // SetAcceleratorMemoryLimit; 0: none
};
// Unavailable: "this build has no CUDA", or no driver or GPU.
absl::StatusOr<std::unique_ptr<Device>> NewAccelerator(
    const AcceleratorOptions& options);

// The number of its GPU in ListAccelerators.
absl::StatusOr<int> AcceleratorIndex(const Device& device);

// From now on the GPU counts as one of `bytes`: Allocate refuses what would
// bring all that is in use of it (context, libraries and other processes
// included) above that. What libraries allocate by themselves can't be refused;
// QueryAcceleratorMemory shows it. 0: no limit but the GPU's.
absl::Status SetAcceleratorMemoryLimit(Device& device, size_t bytes);

// Whether a waiting stream of `device` could hold up another one that exists
// now; called once all streams are there, before the first wait.
absl::Status CheckAcceleratorStreams(Device& device);

struct AcceleratorMemory {
  uint64_t used_peak_bytes;  // of the device, libraries and contexts included
  uint64_t total_bytes;
};
absl::StatusOr<AcceleratorMemory> QueryAcceleratorMemory(Device& device);

}  // namespace slidedp::device
