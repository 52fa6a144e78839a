// CUDA event times on the host's clock. The GPU gives times between two events
// only, as a float of milliseconds; so an anchor event is recorded next to a
// host time, and again before its distance costs precision.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <mutex>

#include "absl/status/statusor.h"

namespace slidedp::device {

// Thread-safe. The current device must be the events' own in every call.
class CudaClock {
 public:
  // `stream` is borrowed and otherwise idle.
  static absl::StatusOr<std::unique_ptr<CudaClock>> Create(cudaStream_t stream);
  ~CudaClock();
  CudaClock(const CudaClock&) = delete;
  CudaClock& operator=(const CudaClock&) = delete;

  // MonotonicNs at which `event`, which is passed, was recorded; off by up to
  // some 20 us, equally so for events resolved within the same seconds.
  absl::StatusOr<int64_t> Resolve(cudaEvent_t event);

 private:
  explicit CudaClock(cudaStream_t stream) : stream_(stream) {}
  absl::Status Anchor();

  const cudaStream_t stream_;
  std::mutex mutex_;  // guards what follows
  cudaEvent_t anchor_ = nullptr;
  cudaEvent_t candidate_ = nullptr;
  int64_t anchor_ns_ = 0;
};

}  // namespace slidedp::device
