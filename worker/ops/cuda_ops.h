// Ops on a CUDA device. Linear and attention have state of their own
// (linear_cuda.h, attention_cuda.h); every other op is kernels in the file
// named after it, behind cuda_kernels.h.
//
// Warm-up: between BeginWarmUp and EndWarmUp every op is called once with each
// shape, and on the very buffers, that steps will use. Algorithms are then
// timed, workspace allocated and kernels loaded; outputs are undefined. After
// EndWarmUp linear and attention refuse what they did not see, and any op that
// needs more workspace than was seen. Without a warm-up the library's first
// choices are taken, and workspace allocated, as shapes come.
//
// Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "common/device/cuda_device.h"
#include "common/device/device.h"
#include "worker/ops/attention_cuda.h"
#include "worker/ops/cuda_workspace.h"
#include "worker/ops/linear_cuda.h"
#include "worker/ops/ops.h"

namespace slidedp::ops {

struct CudaOpsOptions {
  // kF32: the test mode. Activations in float32, weights widened, no TF32.
  ActDType activation = ActDType::kBf16;
  // Bitwise repeatable on the same kind of GPU.
  bool deterministic = false;
  size_t deterministic_workspace_bytes = size_t{4} << 30;
};

class CudaOps : public Ops {
 public:
  static absl::StatusOr<std::unique_ptr<CudaOps>> Create(
      device::Device& device, const CudaOpsOptions& options);

  void BeginWarmUp();
  void EndWarmUp();
  // Of all ops together; final after EndWarmUp.
  size_t workspace_bytes() const {
    return workspace_.bytes() + norm_scratch_.bytes();
  }

  ActDType activation_dtype() const override { return options_.activation; }

  absl::Status EmbeddingForward(const int32_t* ids, const bf16* table,
                                int64_t tokens, int64_t hidden, int64_t vocab,
                                Act out, Stream& stream) override;
  absl::Status EmbeddingBackward(const int32_t* ids, ConstAct d_out,
                                 int64_t tokens, int64_t hidden, int64_t vocab,
                                 float* d_table, Stream& stream) override;
  absl::Status RmsNormForward(ConstAct x, const bf16* w, int64_t tokens,
                              int64_t hidden, double eps, Act out, float* rstd,
                              Stream& stream) override;
  absl::Status RmsNormBackward(ConstAct x, const bf16* w, const float* rstd,
                               ConstAct d_out, int64_t tokens, int64_t hidden,
                               bool add, Act d_x, float* d_w, Act normed,
                               Stream& stream) override;
  absl::Status LinearForward(ConstAct x, const bf16* w, const bf16* bias,
                             int64_t tokens, int64_t in, int64_t out,
                             ConstAct residual, Act y, Stream& stream) override;
  absl::Status LinearBackwardInput(ConstAct d_y, const bf16* w, int64_t tokens,
                                   int64_t in, int64_t out, bool add, Act d_x,
                                   Stream& stream) override;
  absl::Status LinearBackwardWeight(ConstAct x, ConstAct d_y, int64_t tokens,
                                    int64_t in, int64_t out, bool add,
                                    float* d_w, float* d_bias,
                                    Stream& stream) override;
  absl::Status QkNormRopeForward(ConstAct qkv, const bf16* q_norm,
                                 const bf16* k_norm, double eps,
                                 const float* inverse_frequencies,
                                 const AttentionShape& shape, Act out,
                                 float* rstd, Stream& stream) override;
  absl::Status QkNormRopeBackward(ConstAct qkv, const bf16* q_norm,
                                  const bf16* k_norm,
                                  const float* inverse_frequencies,
                                  const AttentionShape& shape,
                                  const float* rstd, Act d_qkv, float* d_q_norm,
                                  float* d_k_norm, Stream& stream) override;
  absl::Status AttentionForward(ConstAct qkv, const AttentionShape& shape,
                                Act out, float* lse, Stream& stream) override;
  absl::Status AttentionBackward(ConstAct qkv, ConstAct out, const float* lse,
                                 ConstAct d_out, const AttentionShape& shape,
                                 Act d_qkv, Stream& stream) override;
  absl::Status SwiGluForward(ConstAct gate_up, int64_t tokens, int64_t inner,
                             Act out, Stream& stream) override;
  absl::Status SwiGluBackward(ConstAct gate_up, ConstAct d_out, int64_t tokens,
                              int64_t inner, Act d_gate_up, Act activated,
                              Stream& stream) override;
  absl::Status CrossEntropy(Act logits, const int32_t* labels, int64_t rows,
                            int64_t vocab, float scale, double* loss_sum,
                            Stream& stream) override;
  absl::Status CastToBf16(const float* x, int64_t count, bf16* out,
                          Stream& stream) override;
  absl::Status CopyUsedRows(const UsedRows& used, int64_t width, int64_t begin,
                            int64_t count, const bf16* values, bf16* out,
                            Stream& stream) override;
  absl::Status SquaredNorm(const bf16* x, int64_t count, double* out,
                           Stream& stream) override;

 private:
  CudaOps(device::Device& device, const CudaOpsOptions& options,
          const device::CudaProperties& properties)
      : device_(device),
        options_(options),
        properties_(properties),
        workspace_(device),
        norm_scratch_(device) {}

  device::Device& device_;
  const CudaOpsOptions options_;
  const device::CudaProperties properties_;
  CudaWorkspace workspace_;
  // Of SquaredNorm alone. It runs beside the other ops, on a stream whose word
  // waits must not hold up theirs through a common piece of memory.
  CudaWorkspace norm_scratch_;
  std::unique_ptr<CudaLinear> linear_;
  std::unique_ptr<CudaAttention> attention_;
};

}  // namespace slidedp::ops
