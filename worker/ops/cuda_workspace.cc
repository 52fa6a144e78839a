#include "worker/ops/cuda_workspace.h"

#include <utility>

#include "common/base/status.h"

namespace slidedp::ops {

absl::StatusOr<void*> CudaWorkspace::Acquire(size_t bytes,
                                             device::Stream& stream) {
  if (used_ == nullptr) {
    SDP_ASSIGN_OR_RETURN(used_, device_.NewEvent());
  }
  if (bytes > buffer_.bytes()) {
    if (frozen_) {
      return absl::FailedPreconditionError(absl::StrCat(
          "an op needs ", bytes, " bytes of workspace, but warm-up planned ",
          buffer_.bytes()));
    }
    SDP_RETURN_IF_ERROR(device_.Synchronize(*used_));
    // The old one first: both may not fit.
    buffer_ = device::Buffer();
    SDP_ASSIGN_OR_RETURN(buffer_, device_.Allocate("ops workspace", bytes,
                                                   device::Memory::kDevice));
  } else if (last_ != nullptr && last_ != &stream) {
    SDP_RETURN_IF_ERROR(device_.Wait(*used_, stream));
  }
  last_ = &stream;
  return buffer_.data();
}

absl::Status CudaWorkspace::Release(device::Stream& stream) {
  return device_.Record(*used_, stream);
}

}  // namespace slidedp::ops
