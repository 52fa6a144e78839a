#include "common/collective/cuda_operation_watch.h"

#include "common/base/clock.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/device/cuda_status.h"

namespace slidedp::collective {
namespace {

using device::CudaStatus;

// Watched at once. More than a stream can hold of them ahead of the GPU would
// be of no use: the oldest is what hangs.
constexpr size_t kWatched = 64;

absl::Status Passed(cudaEvent_t event, bool& passed) {
  const cudaError_t state = cudaEventQuery(event);
  passed = state == cudaSuccess;
  if (state != cudaErrorNotReady) return CudaStatus(state, "cudaEventQuery");
  cudaGetLastError();
  return absl::OkStatus();
}

}  // namespace

OperationWatch::~OperationWatch() {
  for (const Launch& launch : running_) {
    spare_.push_back({launch.begun, launch.ended});
  }
  for (const auto& events : spare_) {
    for (cudaEvent_t event : events) {
      if (event != nullptr) cudaEventDestroy(event);
    }
  }
}

absl::Status OperationWatch::Create() {
  for (size_t i = 0; i < kWatched; ++i) {
    std::array<cudaEvent_t, 2>& events = spare_.emplace_back();
    for (cudaEvent_t& event : events) {
      SDP_RETURN_IF_CUDA_ERROR(
          cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    }
  }
  return absl::OkStatus();
}

absl::Status OperationWatch::Begin(const Operation& operation,
                                   cudaStream_t stream) {
  ++operations_;
  std::array<cudaEvent_t, 2> events;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    SDP_RETURN_IF_ERROR(RetireLocked());
    watched_ = !spare_.empty();
    if (!watched_) return absl::OkStatus();
    events = spare_.back();
    spare_.pop_back();
  }
  const absl::Status status =
      CudaStatus(cudaEventRecord(events[0], stream), "cudaEventRecord");
  std::lock_guard<std::mutex> lock(mutex_);
  if (!status.ok()) {
    watched_ = false;
    spare_.push_back(events);
    return status;
  }
  running_.push_back({operation, operations_, events[0], events[1]});
  return absl::OkStatus();
}

absl::Status OperationWatch::End(cudaStream_t stream) {
  if (!watched_) return absl::OkStatus();
  cudaEvent_t ended;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ended = running_.back().ended;
  }
  SDP_RETURN_IF_CUDA_ERROR(cudaEventRecord(ended, stream));
  std::lock_guard<std::mutex> lock(mutex_);
  running_.back().launched = true;
  return absl::OkStatus();
}

absl::Status OperationWatch::RetireLocked() {
  // Of one still being launched, `ended` may hold an earlier record.
  while (!running_.empty() && running_.front().launched) {
    const Launch& oldest = running_.front();
    bool ended = false;
    SDP_RETURN_IF_ERROR(Passed(oldest.ended, ended));
    if (!ended) break;
    spare_.push_back({oldest.begun, oldest.ended});
    running_.pop_front();
  }
  return absl::OkStatus();
}

absl::Status OperationWatch::Check() {
  std::lock_guard<std::mutex> lock(mutex_);
  SDP_RETURN_IF_ERROR(RetireLocked());
  if (running_.empty()) return absl::OkStatus();
  Launch& oldest = running_.front();
  const int64_t now_ns = MonotonicNs();
  if (oldest.begun_ns == 0) {
    bool begun = false;
    SDP_RETURN_IF_ERROR(Passed(oldest.begun, begun));
    if (begun) oldest.begun_ns = now_ns;
    return absl::OkStatus();
  }
  if (now_ns - oldest.begun_ns < deadline_ns_) return absl::OkStatus();
  return absl::DeadlineExceededError(
      absl::StrCat("operation ", oldest.number, ", ",
                   Describe(oldest.operation.Packed(), oldest.operation.count),
                   ", runs for over ", FormatSeconds(deadline_ns_ * 1e-9),
                   "; another rank has not come that far or is gone"));
}

}  // namespace slidedp::collective
