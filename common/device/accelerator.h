// The GPU of a worker, whatever this build supports: one implementation for
// builds with CUDA, one for builds without, chosen by CMake.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "common/device/device.h"

namespace slidedp::device {

// What must be set before the process's first thread and GPU call; from main.
void PrepareAcceleratorProcess();

struct AcceleratorOptions {
  // Of this worker on this host. With one visible GPU (Slurm and containers
  // hand out one each) it is that GPU, else the GPU of this number.
  int rank = 0;
  size_t memory_limit_bytes = 0;  // 0: the GPU's own
};
// Unavailable: "this build has no CUDA", or no driver or GPU.
absl::StatusOr<std::unique_ptr<Device>> NewAccelerator(
    const AcceleratorOptions& options);

// Whether a waiting stream of `device` could hold up another one that exists
// now; called once all streams are there, before the first wait.
absl::Status CheckAcceleratorStreams(Device& device);

struct AcceleratorMemory {
  uint64_t used_peak_bytes;  // of the device, libraries and contexts included
  uint64_t total_bytes;
};
absl::StatusOr<AcceleratorMemory> QueryAcceleratorMemory(Device& device);

}  // namespace slidedp::device
