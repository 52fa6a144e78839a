#include "common/device/cuda_stream.h"

#include <time.h>

#include <utility>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/device/cuda_status.h"

namespace slidedp::device {
namespace {

// How long a stream's destructor waits for what is pending.
constexpr int64_t kDrainDeadlineNs = 5'000'000'000;
constexpr long kDrainPollNs = 100'000;

absl::Status OtherKind(absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("the ", what, " is not of a CUDA device"));
}

// False: commands are still pending at the deadline.
bool Drain(cudaStream_t stream) {
  const int64_t deadline_ns = MonotonicNs() + kDrainDeadlineNs;
  while (true) {
    const cudaError_t state = cudaStreamQuery(stream);
    cudaGetLastError();
    // After a fault nothing runs any more.
    if (state != cudaErrorNotReady) return true;
    if (MonotonicNs() > deadline_ns) return false;
    const timespec pause = {0, kDrainPollNs};
    nanosleep(&pause, nullptr);
  }
}

}  // namespace

CudaContext::~CudaContext() {
  if (service != nullptr && !abandoned.load()) cudaStreamDestroy(service);
}

absl::Status CudaContext::Use() const {
  SDP_RETURN_IF_CUDA_ERROR(cudaSetDevice(options.index));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<CudaStream>> CudaStream::Create(
    absl::string_view name, std::shared_ptr<CudaContext> context) {
  SDP_RETURN_IF_ERROR(context->Use());
  std::unique_ptr<CudaStream> stream(new CudaStream(name, std::move(context)));
  SDP_RETURN_IF_CUDA_ERROR(
      cudaStreamCreateWithFlags(&stream->handle_, cudaStreamNonBlocking));
  std::lock_guard<std::mutex> lock(stream->context_->mutex);
  stream->context_->streams.insert(stream.get());
  return stream;
}

CudaStream::~CudaStream() {
  {
    std::lock_guard<std::mutex> lock(context_->mutex);
    context_->streams.erase(this);
  }
  if (handle_ == nullptr || !context_->Use().ok()) return;
  if (!Drain(handle_)) {
    context_->abandoned.store(true);
    spdlog::error(
        "stream {} still holds commands after {} and is given up; this "
        "process must leave through _exit",
        name_, FormatSeconds(kDrainDeadlineNs * 1e-9));
    return;
  }
  cudaStreamDestroy(handle_);
}

CudaEvent::~CudaEvent() { cudaEventDestroy(handle_); }

absl::StatusOr<CudaStream*> AsCudaStream(Stream& stream) {
  auto* cuda = dynamic_cast<CudaStream*>(&stream);
  if (cuda == nullptr) {
    return OtherKind(absl::StrCat("stream ", stream.name()));
  }
  return cuda;
}

absl::StatusOr<CudaEvent*> AsCudaEvent(Event& event) {
  auto* cuda = dynamic_cast<CudaEvent*>(&event);
  if (cuda == nullptr) return OtherKind("event");
  return cuda;
}

absl::StatusOr<cudaStream_t> UseCudaStream(Stream& stream) {
  SDP_ASSIGN_OR_RETURN(CudaStream * cuda, AsCudaStream(stream));
  SDP_RETURN_IF_ERROR(cuda->context().Use());
  return cuda->handle();
}

}  // namespace slidedp::device
