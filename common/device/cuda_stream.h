// Stream and event of the CUDA device, and what they share with it. For CUDA
// code of this and other folders that launches kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "absl/status/statusor.h"
#include "common/device/cuda_device.h"
#include "common/device/cuda_driver.h"
#include "common/device/cuda_memory_map.h"
#include "common/device/device.h"

namespace slidedp::device {

class CudaStream;

// Outlives the device if a buffer, registration or stream does.
struct CudaContext {
  CudaOptions options;
  CudaProperties properties = {};
  std::string description;
  CudaDriver driver = {};
  MemoryMap memory;
  // Carries the device's own fills and clock anchors; idle otherwise.
  cudaStream_t service = nullptr;

  std::mutex mutex;  // guards what follows
  size_t memory_limit_bytes = 0;
  size_t pinned_bytes = 0;     // by Allocate
  size_t allocated_bytes = 0;  // by Allocate, device memory
  size_t allocated_peak_bytes = 0;
  size_t used_peak_bytes = 0;
  std::set<CudaStream*> streams;  // alive

  // A stream was given up: anything that waits for the device would hang.
  std::atomic<bool> abandoned{false};

  ~CudaContext();
  // Makes the GPU this thread's current one.
  absl::Status Use() const;
};

class CudaStream : public Stream {
 public:
  static absl::StatusOr<std::unique_ptr<CudaStream>> Create(
      absl::string_view name, std::shared_ptr<CudaContext> context);
  ~CudaStream() override;

  absl::string_view name() const override { return name_; }
  cudaStream_t handle() const { return handle_; }
  const CudaContext& context() const { return *context_; }

 private:
  CudaStream(absl::string_view name, std::shared_ptr<CudaContext> context)
      : name_(name), context_(std::move(context)) {}

  const std::string name_;
  const std::shared_ptr<CudaContext> context_;
  cudaStream_t handle_ = nullptr;
};

class CudaEvent : public Event {
 public:
  explicit CudaEvent(cudaEvent_t handle) : handle_(handle) {}
  ~CudaEvent() override;

  cudaEvent_t handle() const { return handle_; }
  bool recorded() const { return recorded_.load(std::memory_order_relaxed); }
  void set_recorded() { recorded_.store(true, std::memory_order_relaxed); }

 private:
  const cudaEvent_t handle_;
  std::atomic<bool> recorded_{false};
};

// The handle to launch on, with the stream's GPU made current. InvalidArgument
// if the stream is not of a CUDA device.
absl::StatusOr<cudaStream_t> UseCudaStream(Stream& stream);
absl::StatusOr<std::shared_ptr<CudaContext>> CudaContextOf(Device& device);
absl::StatusOr<CudaStream*> AsCudaStream(Stream& stream);
absl::StatusOr<CudaEvent*> AsCudaEvent(Event& event);

}  // namespace slidedp::device
