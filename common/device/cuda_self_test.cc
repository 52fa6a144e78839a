// Hardware channels (architecture section 4): whether a stream that waits holds
// up others.
#include <time.h>

#include <atomic>
#include <new>
#include <string>
#include <vector>

#include "common/base/clock.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/device/cuda_device.h"
#include "common/device/cuda_status.h"
#include "common/device/cuda_stream.h"

namespace slidedp::device {
namespace {

constexpr size_t kProbeBytes = 4096;  // filled on each stream

class Probe {
 public:
  Probe(Device& device, CudaContext& context, int64_t deadline_ns)
      : device_(device), context_(context), deadline_ns_(deadline_ns) {}

  absl::Status Prepare() {
    {
      std::lock_guard<std::mutex> lock(context_.mutex);
      streams_.assign(context_.streams.begin(), context_.streams.end());
    }
    SDP_ASSIGN_OR_RETURN(word_page_,
                         device_.Allocate("stream self-test word", kPageBytes,
                                          Memory::kPinnedHost));
    SDP_ASSIGN_OR_RETURN(
        target_, device_.Allocate("stream self-test target", kProbeBytes,
                                  Memory::kDevice));
    word_ = new (word_page_.data()) std::atomic<uint64_t>(0);
    // One more for the device's own stream, which never waits.
    for (size_t i = 0; i <= streams_.size(); ++i) {
      SDP_ASSIGN_OR_RETURN(auto event, device_.NewEvent());
      passed_.push_back(std::move(event));
    }
    return absl::OkStatus();
  }

  absl::Status Run() {
    std::string shared;
    for (CudaStream* waiting : streams_) {
      SDP_ASSIGN_OR_RETURN(const std::string held_up, HeldUpBy(*waiting));
      if (held_up.empty()) continue;
      absl::StrAppend(&shared, shared.empty() ? "" : "; ", waiting->name(),
                      " holds up ", held_up);
    }
    if (shared.empty()) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        "streams share hardware channels, so a wait for parameters could hang "
        "the job: ",
        shared,
        "; CUDA_DEVICE_MAX_CONNECTIONS=32 must be set before the GPU is "
        "first used"));
  }

 private:
  // Names of the streams that don't move while `waiting` waits.
  absl::StatusOr<std::string> HeldUpBy(CudaStream& waiting) {
    const uint64_t value = word_->load() + 1;
    SDP_RETURN_IF_ERROR(device_.WaitWord(word_, value, waiting));
    absl::Status status = Fill(waiting);
    const int64_t deadline_ns = MonotonicNs() + deadline_ns_;
    std::string held_up;
    for (size_t i = 0; status.ok() && i <= streams_.size(); ++i) {
      const CudaStream* other = i < streams_.size() ? streams_[i] : nullptr;
      if (other == &waiting || Passed(i, deadline_ns, status)) continue;
      absl::StrAppend(&held_up, held_up.empty() ? "" : ", ",
                      other == nullptr ? "the device's own" : other->name());
    }
    // Whatever happened, nothing may stay waiting.
    word_->store(value, std::memory_order_release);
    SDP_RETURN_IF_ERROR(status);
    for (CudaStream* stream : streams_) {
      SDP_RETURN_IF_ERROR(device_.Synchronize(*stream));
    }
    return held_up;
  }

  absl::Status Fill(const CudaStream& waiting) {
    for (size_t i = 0; i < streams_.size(); ++i) {
      if (streams_[i] == &waiting) continue;
      SDP_RETURN_IF_ERROR(
          device_.FillZero(target_.data(), kProbeBytes, *streams_[i]));
      SDP_RETURN_IF_ERROR(device_.Record(*passed_[i], *streams_[i]));
    }
    SDP_RETURN_IF_CUDA_ERROR(
        cudaMemsetAsync(target_.data(), 0, kProbeBytes, context_.service));
    SDP_RETURN_IF_CUDA_ERROR(cudaEventRecord(
        static_cast<CudaEvent&>(*passed_.back()).handle(), context_.service));
    return absl::OkStatus();
  }

  bool Passed(size_t i, int64_t deadline_ns, absl::Status& status) {
    const cudaEvent_t event = static_cast<CudaEvent&>(*passed_[i]).handle();
    while (true) {
      const cudaError_t state = cudaEventQuery(event);
      if (state != cudaErrorNotReady) {
        status = CudaStatus(state, "cudaEventQuery");
        return true;
      }
      cudaGetLastError();
      if (MonotonicNs() > deadline_ns) return false;
      const timespec pause = {0, 20'000};
      nanosleep(&pause, nullptr);
    }
  }

  Device& device_;
  CudaContext& context_;
  const int64_t deadline_ns_;
  std::vector<CudaStream*> streams_;
  Buffer word_page_, target_;
  std::atomic<uint64_t>* word_ = nullptr;
  std::vector<std::unique_ptr<Event>> passed_;
};

}  // namespace

absl::Status CheckStreamIndependence(Device& device, int64_t deadline_ns) {
  SDP_ASSIGN_OR_RETURN(auto context, CudaContextOf(device));
  Probe probe(device, *context, deadline_ns);
  SDP_RETURN_IF_ERROR(probe.Prepare());
  return probe.Run();
}

}  // namespace slidedp::device
