#include "common/device/cuda_driver.h"

#include "common/base/status.h"
#include "common/device/cuda_status.h"

namespace slidedp::device {
namespace {

// The ABI that this file's prototypes have: the _v2 stream memory operations.
constexpr unsigned kAbiVersion = 12000;

template <typename Function>
absl::Status Find(const char* symbol, Function& function) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  SDP_RETURN_IF_CUDA_ERROR(cudaGetDriverEntryPointByVersion(
      symbol, &address, kAbiVersion, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess || address == nullptr) {
    return absl::UnavailableError(
        absl::StrCat("this NVIDIA driver has no ", symbol,
                     " of CUDA 12; install driver 525 or newer"));
  }
  function = reinterpret_cast<Function>(address);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<CudaDriver> LoadCudaDriver() {
  CudaDriver driver = {};
  SDP_RETURN_IF_ERROR(Find("cuStreamWaitValue64", driver.stream_wait_value64));
  SDP_RETURN_IF_ERROR(
      Find("cuStreamWriteValue64", driver.stream_write_value64));
  return driver;
}

}  // namespace slidedp::device
