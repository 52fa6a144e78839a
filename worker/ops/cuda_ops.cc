#include "worker/ops/cuda_ops.h"

#include "common/base/status.h"

namespace slidedp::ops {

absl::StatusOr<std::unique_ptr<CudaOps>> CudaOps::Create(
    device::Device& device, const CudaOpsOptions& options) {
  SDP_ASSIGN_OR_RETURN(const device::CudaProperties properties,
                       device::QueryCudaProperties(device));
  std::unique_ptr<CudaOps> ops(new CudaOps(device, options, properties));
  SDP_ASSIGN_OR_RETURN(ops->linear_, CudaLinear::Create(device, ops->workspace_,
                                                        options.activation,
                                                        options.deterministic));
  SDP_ASSIGN_OR_RETURN(
      ops->attention_,
      CudaAttention::Create(device, ops->workspace_,
                            {options.activation, options.deterministic,
                             options.deterministic_workspace_bytes}));
  return ops;
}

void CudaOps::BeginWarmUp() {
  linear_->set_mode(PlanMode::kTimed);
  attention_->set_mode(PlanMode::kTimed);
}

void CudaOps::EndWarmUp() {
  linear_->set_mode(PlanMode::kFrozen);
  attention_->set_mode(PlanMode::kFrozen);
  workspace_.Freeze();
  norm_scratch_.Freeze();
}

absl::Status CudaOps::LinearForward(ConstAct x, const bf16* w, const bf16* bias,
                                    int64_t tokens, int64_t in, int64_t out,
                                    ConstAct residual, Act y, Stream& stream) {
  return linear_->Forward(x, w, bias, tokens, in, out, residual, y, stream);
}

absl::Status CudaOps::LinearBackwardInput(ConstAct d_y, const bf16* w,
                                          int64_t tokens, int64_t in,
                                          int64_t out, bool add, Act d_x,
                                          Stream& stream) {
  return linear_->BackwardInput(d_y, w, tokens, in, out, add, d_x, stream);
}

absl::Status CudaOps::LinearBackwardWeight(ConstAct x, ConstAct d_y,
                                           int64_t tokens, int64_t in,
                                           int64_t out, bool add, float* d_w,
                                           float* d_bias, Stream& stream) {
  return linear_->BackwardWeight(x, d_y, tokens, in, out, add, d_w, d_bias,
                                 stream);
}

absl::Status CudaOps::AttentionForward(ConstAct qkv,
                                       const AttentionShape& shape, Act out,
                                       float* lse, Stream& stream) {
  return attention_->Forward(qkv, shape, out, lse, stream);
}

absl::Status CudaOps::AttentionBackward(ConstAct qkv, ConstAct out,
                                        const float* lse, ConstAct d_out,
                                        const AttentionShape& shape, Act d_qkv,
                                        Stream& stream) {
  return attention_->Backward(qkv, out, lse, d_out, shape, d_qkv, stream);
}

}  // namespace slidedp::ops
