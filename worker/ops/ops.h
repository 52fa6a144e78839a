// The mathematics of a decoder, one method per operation, enqueued on a stream.
// Two implementations: CPU (BLAS, float32 activations) and CUDA.
//
// Activations are in activation_dtype(), row-major; weights are BF16 as they
// lie in a window slot; weight gradients go to float32 accumulators, to which
// they are added unless an op says otherwise.
// T = tokens (rows) of a micro-batch = batch * sequence. Shapes are given at
// each method. Formulas: models.md section 1. Every op is deterministic: same
// inputs, same bits, whatever the thread count.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "common/base/bf16.h"
#include "common/device/device.h"
#include "worker/ops/used_rows.h"

namespace slidedp::ops {

using device::Stream;
// Activation pointers; the element type is activation_dtype().
using Act = void*;
using ConstAct = const void*;

enum class ActDType { kF32, kBf16 };

// Where the documents of packed sequences lie. Rows are those of the whole
// micro-batch; no document crosses from one sequence into the next, and each
// sequence is whole documents. Positions restart and attention ends at a
// document's first row. Both arrays are device memory and say the same.
struct Documents {
  // [tokens]: the first row of each row's document. Null: every sequence is
  // one document.
  const int32_t* first_row = nullptr;
  // [max_documents + 1]: first rows of the documents, ascending from 0; then
  // `tokens` to the end of the array. Null if first_row is.
  const int32_t* offsets = nullptr;
  int64_t max_documents = 0;
};

struct AttentionShape {
  int64_t batch, sequence;
  int64_t heads, kv_heads, head_dim;
  int64_t window;  // keys a query sees, itself included; 0: all before it
  Documents documents = {};

  int64_t tokens() const { return batch * sequence; }
  int64_t qkv_dim() const { return (heads + 2 * kv_heads) * head_dim; }
};

class Ops {
 public:
  virtual ~Ops() = default;
  virtual ActDType activation_dtype() const = 0;
  size_t act_bytes() const {
    return activation_dtype() == ActDType::kF32 ? 4 : 2;
  }

  // out[t, :] = table[ids[t], :], which may be registered memory: each row is
  // read once. ids < vocab.
  virtual absl::Status EmbeddingForward(const int32_t* ids, const bf16* table,
                                        int64_t tokens, int64_t hidden,
                                        int64_t vocab, Act out,
                                        Stream& stream) = 0;
  // d_table[ids[t], :] += d_out[t, :], in ascending t.
  virtual absl::Status EmbeddingBackward(const int32_t* ids, ConstAct d_out,
                                         int64_t tokens, int64_t hidden,
                                         int64_t vocab, float* d_table,
                                         Stream& stream) = 0;

  // out = x * rstd * w, rstd[t] = 1 / sqrt(mean(x[t]^2) + eps).
  // x, out [tokens, hidden]; w [hidden]; rstd [tokens] float32.
  virtual absl::Status RmsNormForward(ConstAct x, const bf16* w, int64_t tokens,
                                      int64_t hidden, double eps, Act out,
                                      float* rstd, Stream& stream) = 0;
  // d_x (+)= gradient; d_w += gradient. `add`: d_x is added to, else written.
  // `normed`, if not null, is written: the forward's `out`, to the bit. d_x
  // (unless it is added to) or `normed` may be d_out itself.
  virtual absl::Status RmsNormBackward(ConstAct x, const bf16* w,
                                       const float* rstd, ConstAct d_out,
                                       int64_t tokens, int64_t hidden, bool add,
                                       Act d_x, float* d_w, Act normed,
                                       Stream& stream) = 0;

  // y = x w^T (+ bias) (+ residual). x [tokens, in], w [out, in], y and
  // residual [tokens, out]; bias [out] or null; residual null or, it may be, y
  // itself.
  virtual absl::Status LinearForward(ConstAct x, const bf16* w,
                                     const bf16* bias, int64_t tokens,
                                     int64_t in, int64_t out, ConstAct residual,
                                     Act y, Stream& stream) = 0;
  // d_x (+)= d_y w.
  virtual absl::Status LinearBackwardInput(ConstAct d_y, const bf16* w,
                                           int64_t tokens, int64_t in,
                                           int64_t out, bool add, Act d_x,
                                           Stream& stream) = 0;
  // d_w [out, in] (+)= d_y^T x: `add`: added to, else written, whatever it
  // held. d_bias [out] += column sums of d_y, if not null.
  virtual absl::Status LinearBackwardWeight(ConstAct x, ConstAct d_y,
                                            int64_t tokens, int64_t in,
                                            int64_t out, bool add, float* d_w,
                                            float* d_bias, Stream& stream) = 0;

  // qkv, out [tokens, qkv_dim]: per head RMS norm of q and k with weights
  // [head_dim] (null: none), then half-split rope with the position in the
  // document; v is copied. out may be qkv. cos/sin come from
  // `inverse_frequencies` [head_dim / 2], device memory, float32. rstd [tokens,
  // heads + kv_heads] is written when there is a norm.
  virtual absl::Status QkNormRopeForward(ConstAct qkv, const bf16* q_norm,
                                         const bf16* k_norm, double eps,
                                         const float* inverse_frequencies,
                                         const AttentionShape& shape, Act out,
                                         float* rstd, Stream& stream) = 0;
  // d_qkv in place: gradient of `out` becomes gradient of `qkv`.
  virtual absl::Status QkNormRopeBackward(ConstAct qkv, const bf16* q_norm,
                                          const bf16* k_norm,
                                          const float* inverse_frequencies,
                                          const AttentionShape& shape,
                                          const float* rstd, Act d_qkv,
                                          float* d_q_norm, float* d_k_norm,
                                          Stream& stream) = 0;

  // Causal attention over the fused buffer, within each document:
  // softmax(q k^T / sqrt(d)) v.
  // out [tokens, heads * head_dim]; lse [batch, heads, sequence] float32, of
  // packed documents in an order that AttentionBackward alone has to know.
  virtual absl::Status AttentionForward(ConstAct qkv,
                                        const AttentionShape& shape, Act out,
                                        float* lse, Stream& stream) = 0;
  // d_qkv [tokens, qkv_dim] is written.
  virtual absl::Status AttentionBackward(ConstAct qkv, ConstAct out,
                                         const float* lse, ConstAct d_out,
                                         const AttentionShape& shape, Act d_qkv,
                                         Stream& stream) = 0;

  // gate_up [tokens, 2 * inner]: gate first. out [tokens, inner] =
  // silu(gate) * up.
  virtual absl::Status SwiGluForward(ConstAct gate_up, int64_t tokens,
                                     int64_t inner, Act out,
                                     Stream& stream) = 0;
  // d_gate_up is written; it may be gate_up itself. `activated`, if not null,
  // is written: the forward's `out`; it may be d_out itself.
  virtual absl::Status SwiGluBackward(ConstAct gate_up, ConstAct d_out,
                                      int64_t tokens, int64_t inner,
                                      Act d_gate_up, Act activated,
                                      Stream& stream) = 0;

  // logits [rows, vocab] become their gradient: (softmax - onehot) * scale; 0
  // in rows whose label is negative. *loss_sum += sum of token losses
  // (unscaled, float64, device memory). Softmax in float32.
  virtual absl::Status CrossEntropy(Act logits, const int32_t* labels,
                                    int64_t rows, int64_t vocab, float scale,
                                    double* loss_sum, Stream& stream) = 0;

  // out = bf16(x), nearest even; the gradient as it is drained.
  virtual absl::Status CastToBf16(const float* x, int64_t count, bf16* out,
                                  Stream& stream) = 0;
  // Of the elements [begin, begin + count) of a table whose rows have `width`
  // elements, those of used rows are copied from `values` to `out`, both
  // [count]; the rest of `out`, which may be registered memory, stays as it is.
  virtual absl::Status CopyUsedRows(const UsedRows& used, int64_t width,
                                    int64_t begin, int64_t count,
                                    const bf16* values, bf16* out,
                                    Stream& stream) = 0;
  // *out = sum of squares (float64, device memory), overwritten.
  virtual absl::Status SquaredNorm(const bf16* x, int64_t count, double* out,
                                   Stream& stream) = 0;
};

// `threads`: of this rank. Scratch is bounded (kCpuScratchBytes in all).
inline constexpr size_t kCpuScratchBytes = size_t{32} << 20;
std::unique_ptr<Ops> NewCpuOps(int threads);

}  // namespace slidedp::ops
