// The CUDA implementation of Device. One process uses one GPU.
//
// Differences that callers must know:
// - A CUDA stream can't drop a pending word wait. Destroying a stream waits for
//   it (kDrainDeadline); one that still holds commands then is given up, an
//   error is logged, and from there on this device frees nothing (a free would
//   wait for the stream). Such a process must leave through _exit.
// - Copies from host memory that is neither pinned nor registered may block the
//   caller until the stream has come that far.
// - A kernel fault loses the context: every later call fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "common/device/device.h"

namespace slidedp::device {

struct CudaOptions {
  // Among the GPUs that CUDA_VISIBLE_DEVICES leaves visible.
  int index = 0;
  size_t memory_limit_bytes = 0;  // SetCudaMemoryLimit
  // RegisterHost pins this much per call (one call of 512 GiB or more is known
  // to fail). A multiple of the page size.
  size_t registration_piece_bytes = size_t{4} << 30;
};

// Sets what CUDA and NCCL read from the environment when they start:
// CUDA_DEVICE_MAX_CONNECTIONS=32 (a stream that waits must not hold up others)
// and NCCL_RUNTIME_CONNECT=0 (an operation's first use must not wait for the
// device), over whatever is there. Kernels are loaded at their first use, which
// waits for the device, too: users run every kernel once before the first wait
// for a word (all kernels of all libraries, loaded at start, take 1.5 GB of
// host memory a process). From main, before any thread and CUDA call.
void PrepareCudaProcess();

// GPUs visible to this process. Unavailable: no driver or none visible.
absl::StatusOr<int> CudaDeviceCount();

absl::StatusOr<std::unique_ptr<Device>> NewCudaDevice(
    const CudaOptions& options);

// The functions below take a CUDA device; another is InvalidArgument.

struct CudaMemory {
  size_t allocated_bytes;       // by Allocate, device memory only
  size_t allocated_peak_bytes;  // its high-water mark
  // All of the GPU that is in use, by this process's context, libraries and
  // by others; its highest value at any Allocate or call of this function.
  size_t used_bytes;
  size_t used_peak_bytes;
  size_t total_bytes;
};
absl::StatusOr<CudaMemory> QueryCudaMemory(Device& device);

// Allocate refuses device memory that would bring used_bytes above `bytes`: the
// GPU counts as one of that size. 0: no limit.
absl::Status SetCudaMemoryLimit(Device& device, size_t bytes);

// Proves that a stream waiting for a word holds up none of the others that
// exist on the device now: each in turn waits while the others must pass a
// fill within `deadline_ns`. Streams must be idle. FailedPrecondition names
// the streams that share a channel.
absl::Status CheckStreamIndependence(Device& device, int64_t deadline_ns);

// Multiprocessors, compute capability: what kernels size themselves by.
struct CudaProperties {
  int index;
  int multiprocessors;
  int major, minor;
  size_t shared_memory_per_block_bytes;  // opt-in maximum
};
absl::StatusOr<CudaProperties> QueryCudaProperties(const Device& device);

}  // namespace slidedp::device
