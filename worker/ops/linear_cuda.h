// Linear layers on the GPU: the three methods of Ops, with their contracts.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "common/base/bf16.h"
#include "common/device/device.h"
#include "worker/ops/cuda_gemm.h"
#include "worker/ops/cuda_workspace.h"
#include "worker/ops/ops.h"

namespace slidedp::ops {

// Activations in BF16, or in float32 with all arithmetic in float32 (weights
// are widened into the workspace first). Thread-compatible.
class CudaLinear {
 public:
  static absl::StatusOr<std::unique_ptr<CudaLinear>> Create(
      device::Device& device, CudaWorkspace& workspace, ActDType activation,
      bool deterministic);

  void set_mode(PlanMode mode) { gemm_->set_mode(mode); }

  absl::Status Forward(ConstAct x, const bf16* w, const bf16* bias,
                       int64_t tokens, int64_t in, int64_t out,
                       ConstAct residual, Act y, Stream& stream);
  absl::Status BackwardInput(ConstAct d_y, const bf16* w, int64_t tokens,
                             int64_t in, int64_t out, bool add, Act d_x,
                             Stream& stream);
  absl::Status BackwardWeight(ConstAct x, ConstAct d_y, int64_t tokens,
                              int64_t in, int64_t out, bool add, float* d_w,
                              float* d_bias, Stream& stream);

 private:
  CudaLinear(device::Device& device, CudaWorkspace& workspace,
             ActDType activation)
      : device_(device), workspace_(workspace), activation_(activation) {}

  bool wide() const { return activation_ == ActDType::kF32; }
  // The weights [count] as the product takes them: themselves, or widened into
  // `wide_` behind `offset` elements.
  absl::StatusOr<const void*> Operand(const bf16* w, int64_t offset,
                                      int64_t count, Stream& stream);
  absl::Status ReserveWide(int64_t count, Stream& stream);
  absl::Status AddColumnSums(ConstAct d_y, int64_t tokens, int64_t out,
                             float* d_bias, Stream& stream);

  device::Device& device_;
  CudaWorkspace& workspace_;
  const ActDType activation_;
  std::unique_ptr<CudaGemm> gemm_;
  device::Buffer wide_;  // float32 mode: weights, then bias, of one call
};

}  // namespace slidedp::ops
