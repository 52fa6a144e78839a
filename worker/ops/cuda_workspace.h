// Device memory that ops use within one call, one piece for all
// of them. It grows while shapes are planned and is fixed from Freeze on.
// Streams take turns: a call on another stream waits for the last one.
// Thread-compatible.
#pragma once

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "common/device/device.h"

namespace slidedp::ops {

class CudaWorkspace {
 public:
  explicit CudaWorkspace(device::Device& device) : device_(device) {}
  CudaWorkspace(const CudaWorkspace&) = delete;
  CudaWorkspace& operator=(const CudaWorkspace&) = delete;

  // Memory that what is enqueued on `stream` up to Release may use. Growing
  // waits for the last user.
  absl::StatusOr<void*> Acquire(size_t bytes, device::Stream& stream);
  absl::Status Release(device::Stream& stream);

  void Freeze() { frozen_ = true; }
  size_t bytes() const { return buffer_.bytes(); }

 private:
  device::Device& device_;
  device::Buffer buffer_;
  std::unique_ptr<device::Event> used_;
  const device::Stream* last_ = nullptr;  // compared only
  bool frozen_ = false;
};

}  // namespace slidedp::ops
