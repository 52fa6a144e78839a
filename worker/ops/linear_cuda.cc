// Row-major [rows, columns] is column-major [columns, rows] with the same
// stride, so every product below is written transposed:
//   y^T   [out, T]  = w [out, in]      x^T [in, T]
//   d_x^T [in, T]   = w^T [in, out]    d_y^T [out, T]
//   d_w^T [in, out] = x^T [in, T]      d_y [T, out]
#include "worker/ops/linear_cuda.h"

#include "common/base/status.h"
#include "common/device/cuda_status.h"
#include "common/device/cuda_stream.h"
#include "worker/ops/cuda_linear_kernels.h"

namespace slidedp::ops {
namespace {

absl::Status CheckLinear(int64_t tokens, int64_t in, int64_t out) {
  if (tokens < 0 || in <= 0 || out <= 0 || in > INT32_MAX || out > INT32_MAX) {
    return absl::InternalError(
        absl::StrCat("linear op of ", tokens, " x ", in, " x ", out));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaLinear>> CudaLinear::Create(
    device::Device& device, CudaWorkspace& workspace, ActDType activation,
    bool deterministic) {
  std::unique_ptr<CudaLinear> linear(
      new CudaLinear(device, workspace, activation));
  SDP_ASSIGN_OR_RETURN(linear->gemm_,
                       CudaGemm::Create(device, workspace, deterministic));
  return linear;
}

absl::Status CudaLinear::ReserveWide(int64_t count, Stream& stream) {
  if (!wide() || wide_.bytes() >= count * sizeof(float)) {
    return absl::OkStatus();
  }
  SDP_RETURN_IF_ERROR(device_.Synchronize(stream));
  SDP_ASSIGN_OR_RETURN(
      wide_, device_.Allocate("widened weights", count * sizeof(float),
                              device::Memory::kDevice));
  return absl::OkStatus();
}

absl::StatusOr<const void*> CudaLinear::Operand(const bf16* w, int64_t offset,
                                                int64_t count, Stream& stream) {
  if (!wide() || w == nullptr) return static_cast<const void*>(w);
  SDP_ASSIGN_OR_RETURN(cudaStream_t handle, device::UseCudaStream(stream));
  float* out = wide_.as<float>() + offset;
  SDP_RETURN_IF_CUDA_ERROR(LaunchUpcast(w, count, out, handle));
  return static_cast<const void*>(out);
}

absl::Status CudaLinear::Forward(ConstAct x, const bf16* w, const bf16* bias,
                                 int64_t tokens, int64_t in, int64_t out,
                                 ConstAct residual, Act y, Stream& stream) {
  SDP_RETURN_IF_ERROR(CheckLinear(tokens, in, out));
  if (tokens == 0) return absl::OkStatus();
  SDP_RETURN_IF_ERROR(ReserveWide(in * out + out, stream));
  SDP_ASSIGN_OR_RETURN(const void* weights, Operand(w, 0, in * out, stream));
  SDP_ASSIGN_OR_RETURN(const void* bias_values,
                       Operand(bias, in * out, out, stream));
  const GemmShape shape = {.type = wide() ? GemmType::kF32 : GemmType::kBf16,
                           .transpose_a = true,
                           .transpose_b = false,
                           .add = residual != nullptr,
                           .bias = bias != nullptr,
                           .m = out,
                           .n = tokens,
                           .k = in,
                           .lda = in,
                           .ldb = in,
                           .ldd = out};
  return gemm_->Run(shape, {weights, x, residual, y, bias_values}, stream);
}

absl::Status CudaLinear::BackwardInput(ConstAct d_y, const bf16* w,
                                       int64_t tokens, int64_t in, int64_t out,
                                       bool add, Act d_x, Stream& stream) {
  SDP_RETURN_IF_ERROR(CheckLinear(tokens, in, out));
  if (tokens == 0) return absl::OkStatus();
  SDP_RETURN_IF_ERROR(ReserveWide(in * out, stream));
  SDP_ASSIGN_OR_RETURN(const void* weights, Operand(w, 0, in * out, stream));
  const GemmShape shape = {.type = wide() ? GemmType::kF32 : GemmType::kBf16,
                           .transpose_a = false,
                           .transpose_b = false,
                           .add = add,
                           .bias = false,
                           .m = in,
                           .n = tokens,
                           .k = out,
                           .lda = in,
                           .ldb = out,
                           .ldd = in};
  return gemm_->Run(shape, {weights, d_y, add ? d_x : nullptr, d_x, nullptr},
                    stream);
}

absl::Status CudaLinear::BackwardWeight(ConstAct x, ConstAct d_y,
                                        int64_t tokens, int64_t in, int64_t out,
                                        bool add, float* d_w, float* d_bias,
                                        Stream& stream) {
  SDP_RETURN_IF_ERROR(CheckLinear(tokens, in, out));
  if (tokens == 0) {
    return add ? absl::OkStatus()
               : device_.FillZero(d_w, in * out * sizeof(float), stream);
  }
  const GemmShape shape = {
      .type = wide() ? GemmType::kF32 : GemmType::kBf16IntoF32,
      .transpose_a = false,
      .transpose_b = true,
      .add = add,
      .bias = false,
      .m = in,
      .n = out,
      .k = tokens,
      .lda = in,
      .ldb = out,
      .ldd = in};
  SDP_RETURN_IF_ERROR(
      gemm_->Run(shape, {x, d_y, add ? d_w : nullptr, d_w, nullptr}, stream));
  if (d_bias == nullptr) return absl::OkStatus();
  return AddColumnSums(d_y, tokens, out, d_bias, stream);
}

absl::Status CudaLinear::AddColumnSums(ConstAct d_y, int64_t tokens,
                                       int64_t out, float* d_bias,
                                       Stream& stream) {
  SDP_ASSIGN_OR_RETURN(cudaStream_t handle, device::UseCudaStream(stream));
  SDP_ASSIGN_OR_RETURN(
      void* partial,
      workspace_.Acquire(BiasGradientPartials(tokens, out) * sizeof(float),
                         stream));
  auto* sums = static_cast<float*>(partial);
  const cudaError_t launched =
      wide() ? LaunchBiasGradient(static_cast<const float*>(d_y), tokens, out,
                                  sums, d_bias, handle)
             : LaunchBiasGradient(static_cast<const bf16*>(d_y), tokens, out,
                                  sums, d_bias, handle);
  SDP_RETURN_IF_ERROR(device::CudaStatus(launched, "bias gradient"));
  return workspace_.Release(stream);
}

}  // namespace slidedp::ops
