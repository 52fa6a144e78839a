#include "common/base/check.h"
#include "common/base/status.h"
#include "worker/ops/accelerator_ops.h"
#include "worker/ops/cuda_ops.h"

namespace slidedp::ops {

absl::StatusOr<std::unique_ptr<Ops>> NewAcceleratorOps(
    device::Device& device, const AcceleratorOpsOptions& options) {
  CudaOpsOptions cuda;
  cuda.activation = options.float32 ? ActDType::kF32 : ActDType::kBf16;
  cuda.deterministic = options.deterministic;
  return CudaOps::Create(device, cuda);
}

absl::Status WarmUpAcceleratorOps(
    Ops& ops, const std::function<absl::Status()>& rehearsal) {
  auto* cuda = dynamic_cast<CudaOps*>(&ops);
  SDP_CHECK(cuda != nullptr, "warm-up of ops that are not a GPU's");
  cuda->BeginWarmUp();
  SDP_RETURN_IF_ERROR(rehearsal());
  cuda->EndWarmUp();
  return absl::OkStatus();
}

size_t AcceleratorOpsWorkspaceBytes(const Ops& ops) {
  const auto* cuda = dynamic_cast<const CudaOps*>(&ops);
  SDP_CHECK(cuda != nullptr, "workspace of ops that are not a GPU's");
  return cuda->workspace_bytes();
}

}  // namespace slidedp::ops
