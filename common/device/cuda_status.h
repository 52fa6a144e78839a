// CUDA errors as absl::Status. The one place that reads them.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace slidedp::device {

// `call`: the call's source text, of which the function's name is kept. Takes
// the runtime's last error with it, so that the next call doesn't report this
// one. ResourceExhausted: memory; InvalidArgument: a bad argument; Unavailable:
// no device or no driver; Internal: anything else, and the context is lost.
absl::Status CudaStatus(cudaError_t error, absl::string_view call);
absl::Status CudaStatus(CUresult error, absl::string_view call);

}  // namespace slidedp::device

#define SDP_RETURN_IF_CUDA_ERROR(call)                             \
  do {                                                             \
    if (const auto sdp_cuda_error = (call);                        \
        sdp_cuda_error != decltype(sdp_cuda_error){})              \
      return ::slidedp::device::CudaStatus(sdp_cuda_error, #call); \
  } while (false)
