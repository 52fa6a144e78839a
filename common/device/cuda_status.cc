#include "common/device/cuda_status.h"

#include "absl/strings/str_cat.h"

namespace slidedp::device {
namespace {

absl::string_view FunctionName(absl::string_view call) {
  return call.substr(0, call.find('('));
}

absl::StatusCode CodeOf(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return absl::StatusCode::kResourceExhausted;
    case cudaErrorInvalidValue:
    case cudaErrorInvalidDevicePointer:
    case cudaErrorHostMemoryAlreadyRegistered:
    case cudaErrorHostMemoryNotRegistered:
      return absl::StatusCode::kInvalidArgument;
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorSystemNotReady:
    case cudaErrorDevicesUnavailable:
      return absl::StatusCode::kUnavailable;
    default:
      return absl::StatusCode::kInternal;
  }
}

}  // namespace

absl::Status CudaStatus(cudaError_t error, absl::string_view call) {
  if (error == cudaSuccess) return absl::OkStatus();
  cudaGetLastError();
  return absl::Status(
      CodeOf(error),
      absl::StrCat(FunctionName(call), ": ", cudaGetErrorString(error), " (",
                   cudaGetErrorName(error), ")"));
}

absl::Status CudaStatus(CUresult error, absl::string_view call) {
  if (error == CUDA_SUCCESS) return absl::OkStatus();
  // Driver and runtime agree on the numbers of these errors.
  return absl::Status(
      CodeOf(static_cast<cudaError_t>(error)),
      absl::StrCat(FunctionName(call), ": ",
                   cudaGetErrorString(static_cast<cudaError_t>(error)),
                   " (driver error ", static_cast<int>(error), ")"));
}

}  // namespace slidedp::device
