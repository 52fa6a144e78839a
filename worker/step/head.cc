#include "worker/step/head.h"

#include <algorithm>

#include "common/base/status.h"

namespace slidedp::step {

Head::Head(ops::Ops& ops, const model::ModelConfig& config, int64_t tokens,
           int64_t chunk_tokens, const Buffers& buffers)
    : ops_(ops),
      config_(config),
      tokens_(tokens),
      chunk_tokens_(chunk_tokens),
      norm_(buffers.get<void>("layer.input_norm")),
      logits_(buffers.get<void>("head.logits")),
      d_norm_(buffers.get<void>("layer.d_norm")),
      rstd_(buffers.get<float>("layer.rstd")) {}

absl::Status Head::Run(const Weights& weights, ops::ConstAct input,
                       const int32_t* labels, float scale, double* loss_sum,
                       ops::Act d_input, const OnLogits& on_logits,
                       device::Stream& stream) {
  const int64_t h = config_.hidden;
  const int64_t vocab = config_.vocab;
  const size_t row_bytes = h * ops_.act_bytes();
  SDP_RETURN_IF_ERROR(ops_.RmsNormForward(
      input, weights.norm, tokens_, h, config_.rms_eps, norm_, rstd_, stream));
  for (int64_t first = 0; first < tokens_; first += chunk_tokens_) {
    const int64_t rows = std::min(chunk_tokens_, tokens_ - first);
    void* normed = static_cast<char*>(norm_) + first * row_bytes;
    void* d_normed = static_cast<char*>(d_norm_) + first * row_bytes;
    SDP_RETURN_IF_ERROR(ops_.LinearForward(normed, weights.table, nullptr, rows,
                                           h, vocab, /*residual=*/nullptr,
                                           logits_, stream));
    if (on_logits) SDP_RETURN_IF_ERROR(on_logits(first, rows, logits_));
    SDP_RETURN_IF_ERROR(ops_.CrossEntropy(logits_, labels + first, rows, vocab,
                                          scale, loss_sum, stream));
    if (d_input == nullptr) continue;
    SDP_RETURN_IF_ERROR(ops_.LinearBackwardInput(logits_, weights.table, rows,
                                                 h, vocab, /*add=*/false,
                                                 d_normed, stream));
    if (weights.d_table == nullptr) continue;
    SDP_RETURN_IF_ERROR(ops_.LinearBackwardWeight(
        normed, logits_, rows, h, vocab,
        /*add=*/weights.add_to_table || first > 0, weights.d_table,
        /*d_bias=*/nullptr, stream));
  }
  if (d_input == nullptr) return absl::OkStatus();
  return ops_.RmsNormBackward(input, weights.norm, rstd_, d_norm_, tokens_, h,
                              /*add=*/false, d_input, weights.d_norm,
                              /*normed=*/nullptr, stream);
}

}  // namespace slidedp::step
