#include "common/base/check.h"
#include "worker/ops/accelerator_ops.h"

namespace slidedp::ops {

absl::StatusOr<std::unique_ptr<Ops>> NewAcceleratorOps(
    device::Device& device, const AcceleratorOpsOptions& options) {
  return absl::UnavailableError("this build has no CUDA");
}

absl::Status WarmUpAcceleratorOps(
    Ops& ops, const std::function<absl::Status()>& rehearsal) {
  return absl::UnavailableError("this build has no CUDA");
}

size_t AcceleratorOpsWorkspaceBytes(const Ops& ops) {
  CheckFailed(__FILE__, __LINE__, "false", "this build has no CUDA");
}

}  // namespace slidedp::ops
