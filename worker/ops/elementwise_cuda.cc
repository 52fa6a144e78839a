// The methods of CudaOps whose kernels are behind cuda_kernels.h: shapes are
// checked, scratch is lent, the activations' type is chosen.
#include <initializer_list>
#include <string>

#include "common/base/status.h"
#include "common/device/cuda_status.h"
#include "common/device/cuda_stream.h"
#include "worker/ops/cuda_kernels.h"
#include "worker/ops/cuda_ops.h"

namespace slidedp::ops {
namespace {

// Rows and tokens may be none; columns may not.
absl::Status CheckSizes(absl::string_view op, int64_t rows,
                        std::initializer_list<int64_t> columns) {
  bool valid = rows >= 0 && rows <= INT32_MAX;
  for (int64_t n : columns) valid = valid && n > 0 && n <= INT32_MAX / 2;
  if (valid) return absl::OkStatus();
  std::string sizes = absl::StrCat(rows);
  for (int64_t n : columns) absl::StrAppend(&sizes, " x ", n);
  return absl::InternalError(absl::StrCat(op, " of ", sizes));
}

absl::StatusOr<RopeShape> RopeShapeOf(const AttentionShape& s) {
  const bool valid = s.batch >= 0 && s.sequence > 0 && s.kv_heads > 0 &&
                     s.heads > 0 && s.head_dim > 0 && s.head_dim % 2 == 0 &&
                     s.tokens() <= INT32_MAX && s.qkv_dim() <= INT32_MAX;
  if (!valid) {
    return absl::InternalError(
        absl::StrCat("rope of ", s.batch, " x ", s.sequence, " tokens, ",
                     s.heads, "/", s.kv_heads, " heads of ", s.head_dim));
  }
  if (s.head_dim > kMaxRopeHeadDim) {
    return absl::UnimplementedError(
        absl::StrCat("rope of heads of ", s.head_dim, ": at most ",
                     kMaxRopeHeadDim, " are supported"));
  }
  return RopeShape{s.tokens(), s.sequence, s.heads,
                   s.kv_heads, s.head_dim, s.documents.first_row};
}

// launch(handle, T()), T being the activations' element.
template <typename Launch>
absl::Status OnStream(ActDType dtype, absl::string_view op, Stream& stream,
                      Launch launch) {
  SDP_ASSIGN_OR_RETURN(cudaStream_t handle, device::UseCudaStream(stream));
  return device::CudaStatus(dtype == ActDType::kF32 ? launch(handle, float{})
                                                    : launch(handle, bf16{}),
                            op);
}

// The same with scratch: launch(handle, scratch, T()).
template <typename Launch>
absl::Status WithScratch(CudaWorkspace& workspace, size_t bytes, ActDType dtype,
                         absl::string_view op, Stream& stream, Launch launch) {
  SDP_ASSIGN_OR_RETURN(void* scratch, workspace.Acquire(bytes, stream));
  SDP_RETURN_IF_ERROR(
      OnStream(dtype, op, stream, [&](cudaStream_t handle, auto element) {
        return launch(handle, scratch, element);
      }));
  return workspace.Release(stream);
}

template <typename T>
const T* As(ConstAct x, T) {
  return static_cast<const T*>(x);
}
template <typename T>
T* As(Act x, T) {
  return static_cast<T*>(x);
}

}  // namespace

absl::Status CudaOps::EmbeddingForward(const int32_t* ids, const bf16* table,
                                       int64_t tokens, int64_t hidden,
                                       int64_t vocab, Act out, Stream& stream) {
  SDP_RETURN_IF_ERROR(CheckSizes("embedding", tokens, {hidden, vocab}));
  if (tokens == 0) return absl::OkStatus();
  return WithScratch(workspace_, vocab * sizeof(int32_t), options_.activation,
                     "embedding", stream,
                     [&](cudaStream_t handle, void* scratch, auto e) {
                       return LaunchEmbeddingForward(
                           ids, table, tokens, hidden, vocab,
                           static_cast<int32_t*>(scratch), As(out, e), handle);
                     });
}

absl::Status CudaOps::EmbeddingBackward(const int32_t* ids, ConstAct d_out,
                                        int64_t tokens, int64_t hidden,
                                        int64_t vocab, float* d_table,
                                        Stream& stream) {
  SDP_RETURN_IF_ERROR(
      CheckSizes("embedding gradient", tokens, {hidden, vocab}));
  if (tokens == 0) return absl::OkStatus();
  return WithScratch(workspace_, EmbeddingBackwardScratchBytes(tokens),
                     options_.activation, "embedding gradient", stream,
                     [&](cudaStream_t handle, void* scratch, auto e) {
                       return LaunchEmbeddingBackward(ids, As(d_out, e), tokens,
                                                      hidden, vocab, scratch,
                                                      d_table, handle);
                     });
}

absl::Status CudaOps::RmsNormForward(ConstAct x, const bf16* w, int64_t tokens,
                                     int64_t hidden, double eps, Act out,
                                     float* rstd, Stream& stream) {
  SDP_RETURN_IF_ERROR(CheckSizes("RMS norm", tokens, {hidden}));
  if (tokens == 0) return absl::OkStatus();
  return OnStream(options_.activation, "RMS norm", stream,
                  [&](cudaStream_t handle, auto e) {
                    return LaunchRmsNormForward(As(x, e), w, tokens, hidden,
                                                static_cast<float>(eps),
                                                As(out, e), rstd, handle);
                  });
}

absl::Status CudaOps::RmsNormBackward(ConstAct x, const bf16* w,
                                      const float* rstd, ConstAct d_out,
                                      int64_t tokens, int64_t hidden, bool add,
                                      Act d_x, float* d_w, Act normed,
                                      Stream& stream) {
  SDP_RETURN_IF_ERROR(CheckSizes("RMS norm gradient", tokens, {hidden}));
  if (hidden > kMaxNormHidden) {
    return absl::UnimplementedError(
        absl::StrCat("RMS norm gradient: hidden size ", hidden, "; at most ",
                     kMaxNormHidden, " is supported"));
  }
  if (tokens == 0) return absl::OkStatus();
  return WithScratch(workspace_, GradientParts(tokens) * hidden * sizeof(float),
                     options_.activation, "RMS norm gradient", stream,
                     [&](cudaStream_t handle, void* scratch, auto e) {
                       return LaunchRmsNormBackward(
                           As(x, e), w, rstd, As(d_out, e), tokens, hidden, add,
                           static_cast<float*>(scratch), As(d_x, e), d_w,
                           As(normed, e), handle);
                     });
}

absl::Status CudaOps::QkNormRopeForward(ConstAct qkv, const bf16* q_norm,
                                        const bf16* k_norm, double eps,
                                        const float* inverse_frequencies,
                                        const AttentionShape& shape, Act out,
                                        float* rstd, Stream& stream) {
  SDP_ASSIGN_OR_RETURN(const RopeShape rope, RopeShapeOf(shape));
  if (rope.tokens == 0) return absl::OkStatus();
  return OnStream(options_.activation, "rope", stream,
                  [&](cudaStream_t handle, auto e) {
                    return LaunchQkNormRopeForward(
                        As(qkv, e), q_norm, k_norm, static_cast<float>(eps),
                        inverse_frequencies, rope, As(out, e), rstd, handle);
                  });
}

absl::Status CudaOps::QkNormRopeBackward(ConstAct qkv, const bf16* q_norm,
                                         const bf16* k_norm,
                                         const float* inverse_frequencies,
                                         const AttentionShape& shape,
                                         const float* rstd, Act d_qkv,
                                         float* d_q_norm, float* d_k_norm,
                                         Stream& stream) {
  SDP_ASSIGN_OR_RETURN(const RopeShape rope, RopeShapeOf(shape));
  if (rope.tokens == 0) return absl::OkStatus();
  return WithScratch(
      workspace_,
      GradientParts(rope.tokens) * 2 * rope.head_dim * sizeof(float),
      options_.activation, "rope gradient", stream,
      [&](cudaStream_t handle, void* scratch, auto e) {
        return LaunchQkNormRopeBackward(
            As(qkv, e), q_norm, k_norm, inverse_frequencies, rope, rstd,
            static_cast<float*>(scratch), As(d_qkv, e), d_q_norm, d_k_norm,
            handle);
      });
}

absl::Status CudaOps::SwiGluForward(ConstAct gate_up, int64_t tokens,
                                    int64_t inner, Act out, Stream& stream) {
  SDP_RETURN_IF_ERROR(CheckSizes("SwiGLU", tokens, {inner}));
  if (tokens == 0) return absl::OkStatus();
  return OnStream(options_.activation, "SwiGLU", stream,
                  [&](cudaStream_t handle, auto e) {
                    return LaunchSwiGluForward(As(gate_up, e), tokens, inner,
                                               As(out, e), handle);
                  });
}

absl::Status CudaOps::SwiGluBackward(ConstAct gate_up, ConstAct d_out,
                                     int64_t tokens, int64_t inner,
                                     Act d_gate_up, Act activated,
                                     Stream& stream) {
  SDP_RETURN_IF_ERROR(CheckSizes("SwiGLU gradient", tokens, {inner}));
  if (tokens == 0) return absl::OkStatus();
  return OnStream(options_.activation, "SwiGLU gradient", stream,
                  [&](cudaStream_t handle, auto e) {
                    return LaunchSwiGluBackward(As(gate_up, e), As(d_out, e),
                                                tokens, inner, As(d_gate_up, e),
                                                As(activated, e), handle);
                  });
}

absl::Status CudaOps::CrossEntropy(Act logits, const int32_t* labels,
                                   int64_t rows, int64_t vocab, float scale,
                                   double* loss_sum, Stream& stream) {
  SDP_RETURN_IF_ERROR(CheckSizes("cross-entropy", rows, {vocab}));
  if (rows == 0) return absl::OkStatus();
  return WithScratch(workspace_, rows * sizeof(double), options_.activation,
                     "cross-entropy", stream,
                     [&](cudaStream_t handle, void* scratch, auto e) {
                       return LaunchCrossEntropy(
                           As(logits, e), labels, rows, vocab, scale,
                           static_cast<double*>(scratch), loss_sum, handle);
                     });
}

absl::Status CudaOps::CastToBf16(const float* x, int64_t count, bf16* out,
                                 Stream& stream) {
  if (count == 0) return absl::OkStatus();
  if (count < 0) {
    return absl::InternalError(absl::StrCat("cast of ", count, " elements"));
  }
  SDP_ASSIGN_OR_RETURN(cudaStream_t handle, device::UseCudaStream(stream));
  return device::CudaStatus(LaunchCastToBf16(x, count, out, handle),
                            "cast to BF16");
}

absl::Status CudaOps::CopyUsedRows(const UsedRows& used, int64_t width,
                                   int64_t begin, int64_t count,
                                   const bf16* values, bf16* out,
                                   Stream& stream) {
  if (count < 0 || begin < 0 || width <= 0) {
    return absl::InternalError(absl::StrCat("copy of used rows: ", count,
                                            " elements from ", begin,
                                            ", rows of ", width));
  }
  if (count == 0) return absl::OkStatus();
  SDP_ASSIGN_OR_RETURN(cudaStream_t handle, device::UseCudaStream(stream));
  return device::CudaStatus(
      LaunchCopyUsedRows(used, width, begin, count, values, out, handle),
      "copy of used rows");
}

absl::Status CudaOps::SquaredNorm(const bf16* x, int64_t count, double* out,
                                  Stream& stream) {
  if (count < 0) {
    return absl::InternalError(absl::StrCat("norm of ", count, " elements"));
  }
  SDP_ASSIGN_OR_RETURN(
      void* scratch,
      norm_scratch_.Acquire(kSquaredNormParts * sizeof(double), stream));
  SDP_ASSIGN_OR_RETURN(cudaStream_t handle, device::UseCudaStream(stream));
  SDP_RETURN_IF_ERROR(device::CudaStatus(
      LaunchSquaredNorm(x, count, static_cast<double*>(scratch), out, handle),
      "squared norm"));
  return norm_scratch_.Release(stream);
}

}  // namespace slidedp::ops
