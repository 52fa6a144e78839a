#include "common/device/cuda_clock.h"

#include <cmath>
#include <cstdlib>
#include <utility>

#include "common/base/clock.h"
#include "common/base/status.h"
#include "common/device/cuda_status.h"

namespace slidedp::device {
namespace {

// A float of milliseconds resolves 1 us up to 16 s.
constexpr int64_t kAnchorAgeNs = 8'000'000'000;
constexpr int kAnchorTries = 8;

}  // namespace

absl::StatusOr<std::unique_ptr<CudaClock>> CudaClock::Create(
    cudaStream_t stream) {
  std::unique_ptr<CudaClock> clock(new CudaClock(stream));
  // No blocking-sync flag: the host must see the anchor at once.
  SDP_RETURN_IF_CUDA_ERROR(cudaEventCreate(&clock->anchor_));
  SDP_RETURN_IF_CUDA_ERROR(cudaEventCreate(&clock->candidate_));
  std::lock_guard<std::mutex> lock(clock->mutex_);
  SDP_RETURN_IF_ERROR(clock->Anchor());
  return clock;
}

CudaClock::~CudaClock() {
  if (anchor_ != nullptr) cudaEventDestroy(anchor_);
  if (candidate_ != nullptr) cudaEventDestroy(candidate_);
}

absl::StatusOr<int64_t> CudaClock::Resolve(cudaEvent_t event) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (MonotonicNs() - anchor_ns_ > kAnchorAgeNs) {
    SDP_RETURN_IF_ERROR(Anchor());
  }
  float elapsed_ms = 0;
  SDP_RETURN_IF_CUDA_ERROR(cudaEventElapsedTime(&elapsed_ms, anchor_, event));
  return anchor_ns_ + std::llround(static_cast<double>(elapsed_ms) * 1'000'000);
}

// The try during which the least host time passed tells best when it was.
absl::Status CudaClock::Anchor() {
  int64_t best_ns = INT64_MAX;
  for (int i = 0; i < kAnchorTries; ++i) {
    const int64_t begin_ns = MonotonicNs();
    SDP_RETURN_IF_CUDA_ERROR(cudaEventRecord(candidate_, stream_));
    cudaError_t state;
    do {
      state = cudaEventQuery(candidate_);
    } while (state == cudaErrorNotReady);
    const int64_t span_ns = MonotonicNs() - begin_ns;
    cudaGetLastError();
    SDP_RETURN_IF_ERROR(CudaStatus(state, "cudaEventQuery"));
    if (span_ns >= best_ns) continue;
    best_ns = span_ns;
    anchor_ns_ = begin_ns + span_ns / 2;
    std::swap(anchor_, candidate_);
  }
  return absl::OkStatus();
}

}  // namespace slidedp::device
