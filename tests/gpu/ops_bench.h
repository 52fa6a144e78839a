// A CUDA device, a stream, and operands that go there and back.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "common/base/check.h"
#include "common/base/status.h"
#include "common/device/cuda_device.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/worker_ops/ops_fixture.h"
#include "worker/ops/cuda_workspace.h"
#include "worker/ops/ops.h"

namespace slidedp::ops {

// Root of the mean square error, relative to that of `expected`.
inline double RmsError(const Floats& actual, const Vec& expected) {
  if (actual.size() != expected.size()) return INFINITY;
  double error = 0, size = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double difference = actual[i] - expected[i];
    error += difference * difference;
    size += expected[i] * expected[i];
  }
  return size == 0 ? std::sqrt(error) : std::sqrt(error / size);
}

inline Bf16s Rounded(const Floats& x) {
  Bf16s rounded;
  for (float value : x) rounded.push_back(FloatToBf16Even(value));
  return rounded;
}

inline Floats Widened(const Bf16s& x) {
  Floats wide;
  for (bf16 value : x) wide.push_back(Bf16ToFloat(value));
  return wide;
}

class GpuBench {
 public:
  GpuBench() {
    auto device = device::NewCudaDevice({});
    SDP_CHECK(device.ok(), device.status().message());
    device_ = *std::move(device);
    stream_ = *device_->NewStream("compute");
    workspace_ = std::make_unique<CudaWorkspace>(*device_);
  }

  device::Device& device() { return *device_; }
  Stream& stream() { return *stream_; }
  CudaWorkspace& workspace() { return *workspace_; }

  template <typename T>
  T* Upload(const std::vector<T>& host) {
    auto buffer = device_->Allocate("operand", host.size() * sizeof(T),
                                    device::Memory::kDevice);
    SDP_CHECK(buffer.ok(), buffer.status().message());
    T* data = buffer->template as<T>();
    Move(data, host.data(), host.size() * sizeof(T));
    buffers_.push_back(*std::move(buffer));
    return data;
  }
  template <typename T>
  std::vector<T> Download(const T* data, size_t count) {
    std::vector<T> host(count);
    Move(host.data(), data, count * sizeof(T));
    return host;
  }

  // Activations: float32, or BF16 as they are rounded on the way.
  Act UploadAct(const Floats& x, ActDType dtype) {
    if (dtype == ActDType::kF32) return Upload(x);
    return Upload(Rounded(x));
  }
  Floats DownloadAct(ConstAct data, size_t count, ActDType dtype) {
    if (dtype == ActDType::kF32) {
      return Download(static_cast<const float*>(data), count);
    }
    return Widened(Download(static_cast<const bf16*>(data), count));
  }

 private:
  void Move(void* dst, const void* src, size_t bytes) {
    const absl::Status status = [&] {
      SDP_RETURN_IF_ERROR(device_->Copy(dst, src, bytes, *stream_));
      return device_->Synchronize(*stream_);
    }();
    SDP_CHECK(status.ok(), status.message());
  }

  std::unique_ptr<device::Device> device_;
  std::vector<device::Buffer> buffers_;
  std::unique_ptr<CudaWorkspace> workspace_;
  std::unique_ptr<Stream> stream_;
};

// What an activation is once it is on the device.
inline Floats OnDevice(const Floats& x, ActDType dtype) {
  return dtype == ActDType::kF32 ? x : Widened(Rounded(x));
}

}  // namespace slidedp::ops
