// Ops that count how often some of them are asked for.
#pragma once

#include <memory>
#include <utility>

#include "worker/ops/ops.h"

namespace slidedp::step {

using ops::Act;
using ops::AttentionShape;
using ops::ConstAct;
using ops::Stream;

class CountingOps : public ops::Ops {
 public:
  struct Counts {
    int linear_forward = 0, attention_forward = 0, rope_forward = 0;
    int norm_forward = 0, swiglu_forward = 0;
  };

  explicit CountingOps(std::unique_ptr<ops::Ops> ops) : ops_(std::move(ops)) {}
  Counts counts;

  ops::ActDType activation_dtype() const override {
    return ops_->activation_dtype();
  }
  absl::Status EmbeddingForward(const int32_t* ids, const bf16* table,
                                int64_t tokens, int64_t hidden, int64_t vocab,
                                Act out, Stream& stream) override {
    return ops_->EmbeddingForward(ids, table, tokens, hidden, vocab, out,
                                  stream);
  }
  absl::Status EmbeddingBackward(const int32_t* ids, ConstAct d_out,
                                 int64_t tokens, int64_t hidden, int64_t vocab,
                                 float* d_table, Stream& stream) override {
    return ops_->EmbeddingBackward(ids, d_out, tokens, hidden, vocab, d_table,
                                   stream);
  }
  absl::Status RmsNormForward(ConstAct x, const bf16* w, int64_t tokens,
                              int64_t hidden, double eps, Act out, float* rstd,
                              Stream& stream) override {
    ++counts.norm_forward;
    return ops_->RmsNormForward(x, w, tokens, hidden, eps, out, rstd, stream);
  }
  absl::Status RmsNormBackward(ConstAct x, const bf16* w, const float* rstd,
                               ConstAct d_out, int64_t tokens, int64_t hidden,
                               bool add, Act d_x, float* d_w, Act normed,
                               Stream& stream) override {
    return ops_->RmsNormBackward(x, w, rstd, d_out, tokens, hidden, add, d_x,
                                 d_w, normed, stream);
  }
  absl::Status LinearForward(ConstAct x, const bf16* w, const bf16* bias,
                             int64_t tokens, int64_t in, int64_t out,
                             ConstAct residual, Act y,
                             Stream& stream) override {
    ++counts.linear_forward;
    return ops_->LinearForward(x, w, bias, tokens, in, out, residual, y,
                               stream);
  }
  absl::Status LinearBackwardInput(ConstAct d_y, const bf16* w, int64_t tokens,
                                   int64_t in, int64_t out, bool add, Act d_x,
                                   Stream& stream) override {
    return ops_->LinearBackwardInput(d_y, w, tokens, in, out, add, d_x, stream);
  }
  absl::Status LinearBackwardWeight(ConstAct x, ConstAct d_y, int64_t tokens,
                                    int64_t in, int64_t out, bool add,
                                    float* d_w, float* d_bias,
                                    Stream& stream) override {
    return ops_->LinearBackwardWeight(x, d_y, tokens, in, out, add, d_w, d_bias,
                                      stream);
  }
  absl::Status QkNormRopeForward(ConstAct qkv, const bf16* q_norm,
                                 const bf16* k_norm, double eps,
                                 const float* inverse_frequencies,
                                 const AttentionShape& shape, Act out,
                                 float* rstd, Stream& stream) override {
    ++counts.rope_forward;
    return ops_->QkNormRopeForward(qkv, q_norm, k_norm, eps,
                                   inverse_frequencies, shape, out, rstd,
                                   stream);
  }
  absl::Status QkNormRopeBackward(ConstAct qkv, const bf16* q_norm,
                                  const bf16* k_norm,
                                  const float* inverse_frequencies,
                                  const AttentionShape& shape,
                                  const float* rstd, Act d_qkv, float* d_q_norm,
                                  float* d_k_norm, Stream& stream) override {
    return ops_->QkNormRopeBackward(qkv, q_norm, k_norm, inverse_frequencies,
                                    shape, rstd, d_qkv, d_q_norm, d_k_norm,
                                    stream);
  }
  absl::Status AttentionForward(ConstAct qkv, const AttentionShape& shape,
                                Act out, float* lse, Stream& stream) override {
    ++counts.attention_forward;
    return ops_->AttentionForward(qkv, shape, out, lse, stream);
  }
  absl::Status AttentionBackward(ConstAct qkv, ConstAct out, const float* lse,
                                 ConstAct d_out, const AttentionShape& shape,
                                 Act d_qkv, Stream& stream) override {
    return ops_->AttentionBackward(qkv, out, lse, d_out, shape, d_qkv, stream);
  }
  absl::Status SwiGluForward(ConstAct gate_up, int64_t tokens, int64_t inner,
                             Act out, Stream& stream) override {
    ++counts.swiglu_forward;
    return ops_->SwiGluForward(gate_up, tokens, inner, out, stream);
  }
  absl::Status SwiGluBackward(ConstAct gate_up, ConstAct d_out, int64_t tokens,
                              int64_t inner, Act d_gate_up, Act activated,
                              Stream& stream) override {
    return ops_->SwiGluBackward(gate_up, d_out, tokens, inner, d_gate_up,
                                activated, stream);
  }
  absl::Status CrossEntropy(Act logits, const int32_t* labels, int64_t rows,
                            int64_t vocab, float scale, double* loss_sum,
                            Stream& stream) override {
    return ops_->CrossEntropy(logits, labels, rows, vocab, scale, loss_sum,
                              stream);
  }
  absl::Status CastToBf16(const float* x, int64_t count, bf16* out,
                          Stream& stream) override {
    return ops_->CastToBf16(x, count, out, stream);
  }
  absl::Status CopyUsedRows(const ops::UsedRows& used, int64_t width,
                            int64_t begin, int64_t count, const bf16* values,
                            bf16* out, Stream& stream) override {
    return ops_->CopyUsedRows(used, width, begin, count, values, out, stream);
  }
  absl::Status SquaredNorm(const bf16* x, int64_t count, double* out,
                           Stream& stream) override {
    return ops_->SquaredNorm(x, count, out, stream);
  }

 private:
  const std::unique_ptr<ops::Ops> ops_;
};

}  // namespace slidedp::step
