#include "worker/step/decoder.h"

#include "common/base/status.h"

namespace slidedp::step {

using model::Role;
using policy::Bit;
using policy::Segment;

namespace {

constexpr uint8_t kAllSegments = (1u << policy::kSegments) - 1;

// What a layer's backward pass computes again. It reads every segment but the
// norms, whose outputs it gets from their backward passes, and but the plain
// projections, which only QK-norm's gradient needs.
uint8_t MissingInBackward(uint8_t kept, bool qk_norm) {
  uint8_t needed = Bit(Segment::kRotated) | Bit(Segment::kAttention) |
                   Bit(Segment::kMiddle) | Bit(Segment::kGateUp);
  if (qk_norm) needed |= Bit(Segment::kQkv);
  const auto missing = [&](Segment s) {
    return (needed & ~kept & Bit(s)) != 0;
  };
  // From the last to the first: what a missing one is made from.
  if (missing(Segment::kGateUp)) needed |= Bit(Segment::kPostNorm);
  if (missing(Segment::kRotated)) needed |= Bit(Segment::kQkv);
  if (missing(Segment::kQkv)) needed |= Bit(Segment::kInputNorm);
  return needed & ~kept;
}

char* Plus(void* base, uint64_t bytes) {
  return base == nullptr ? nullptr : static_cast<char*>(base) + bytes;
}

}  // namespace

Decoder::Decoder(ops::Ops& ops, const model::ModelConfig& config,
                 const policy::Plan& plan, const Activations* activations,
                 const Buffers& buffers)
    : ops_(ops),
      config_(config),
      activations_(activations),
      batch_(plan.micro_batch_size),
      sequence_(plan.sequence_length),
      tokens_(plan.micro_batch_tokens()),
      documents_(plan.micro_batch_documents()),
      rstd_(buffers.get<float>("layer.rstd")),
      activated_(buffers.get<void>("layer.activated")),
      d_norm_(buffers.get<void>("layer.d_norm")),
      d_attention_(buffers.get<void>("layer.d_attention")),
      d_qkv_(buffers.get<void>("layer.d_qkv")),
      rope_(buffers.get<float>("rope")) {
  for (int s = 0; s < policy::kSegments; ++s) {
    const Segment segment = static_cast<Segment>(s);
    scratch_[s] = buffers.get<void>(policy::ScratchName(segment));
    layouts_[s] = policy::LayoutOf(config, plan, segment);
  }
  for (int64_t l = 0; l < config.layers; ++l) {
    kept_.push_back(policy::KeptSegments(config, plan, l));
  }
}

ops::AttentionShape Decoder::Shape(int64_t layer, int64_t micro_batch) const {
  ops::AttentionShape shape = {batch_,           sequence_,
                               config_.heads,    config_.kv_heads,
                               config_.head_dim, config_.window[layer]};
  if (first_rows_ != nullptr) {
    shape.documents = {first_rows_ + micro_batch * tokens_,
                       offsets_ + micro_batch * (documents_ + 1), documents_};
  }
  return shape;
}

Decoder::Places Decoder::At(const Piece& piece, Pass pass) const {
  Places a;
  a.kept = kept_[piece.layer];
  for (int s = 0; s < policy::kSegments; ++s) {
    a.segments[s] =
        (a.kept >> s & 1) != 0 ? activations_->at(piece, s, pass) : scratch_[s];
  }
  const auto statistics = [&](Segment segment) {
    const int s = static_cast<int>(segment);
    return reinterpret_cast<float*>(
        Plus(a.segments[s], layouts_[s].statistics_offset));
  };
  a.qk_rstd = statistics(Segment::kRotated);
  a.lse = statistics(Segment::kAttention);
  a.rstd1 = a.kept == 0 ? rstd_
                        : static_cast<float*>(activations_->at(
                              piece, policy::kNormsPart, pass));
  a.rstd2 = a.rstd1 + tokens_;
  // Without QK-norm the projections turn in place.
  if (!config_.qk_norm) {
    a.segments[static_cast<int>(Segment::kQkv)] = a.at(Segment::kRotated);
  }
  return a;
}

absl::Status Decoder::Compute(uint8_t mask, const ops::AttentionShape& shape,
                              const Places& a, const UnitWeights& weights,
                              ops::ConstAct input, device::Stream& stream) {
  const int64_t h = config_.hidden;
  const auto wanted = [mask](Segment s) { return (mask & Bit(s)) != 0; };
  if (wanted(Segment::kInputNorm)) {
    SDP_RETURN_IF_ERROR(ops_.RmsNormForward(
        input, weights.w(Role::kInputNorm), tokens_, h, config_.rms_eps,
        a.at(Segment::kInputNorm), a.rstd1, stream));
  }
  if (wanted(Segment::kQkv)) {
    SDP_RETURN_IF_ERROR(ops_.LinearForward(
        a.at(Segment::kInputNorm), weights.w(Role::kQ), weights.w(Role::kQBias),
        tokens_, h, config_.qkv_dim(),
        /*residual=*/nullptr, a.at(Segment::kQkv), stream));
  }
  if (wanted(Segment::kRotated)) {
    SDP_RETURN_IF_ERROR(ops_.QkNormRopeForward(
        a.at(Segment::kQkv), weights.w(Role::kQNorm), weights.w(Role::kKNorm),
        config_.rms_eps, rope_, shape, a.at(Segment::kRotated), a.qk_rstd,
        stream));
  }
  if (wanted(Segment::kAttention)) {
    SDP_RETURN_IF_ERROR(ops_.AttentionForward(a.at(Segment::kRotated), shape,
                                              a.at(Segment::kAttention), a.lse,
                                              stream));
  }
  if (wanted(Segment::kMiddle)) {
    SDP_RETURN_IF_ERROR(
        ops_.LinearForward(a.at(Segment::kAttention), weights.w(Role::kO),
                           /*bias=*/nullptr, tokens_, config_.q_dim(), h,
                           /*residual=*/input, a.at(Segment::kMiddle), stream));
  }
  if (wanted(Segment::kPostNorm)) {
    SDP_RETURN_IF_ERROR(ops_.RmsNormForward(
        a.at(Segment::kMiddle), weights.w(Role::kPostNorm), tokens_, h,
        config_.rms_eps, a.at(Segment::kPostNorm), a.rstd2, stream));
  }
  if (!wanted(Segment::kGateUp)) return absl::OkStatus();
  return ops_.LinearForward(a.at(Segment::kPostNorm), weights.w(Role::kGate),
                            /*bias=*/nullptr, tokens_, h,
                            2 * config_.intermediate, /*residual=*/nullptr,
                            a.at(Segment::kGateUp), stream);
}

absl::Status Decoder::Forward(int64_t layer, int64_t micro_batch,
                              const UnitWeights& weights, ops::ConstAct input,
                              ops::Act output, device::Stream& stream) {
  const Places a = At({layer, micro_batch}, Pass::kForward);
  SDP_RETURN_IF_ERROR(Compute(kAllSegments, Shape(layer, micro_batch), a,
                              weights, input, stream));
  SDP_RETURN_IF_ERROR(ops_.SwiGluForward(a.at(Segment::kGateUp), tokens_,
                                         config_.intermediate, activated_,
                                         stream));
  return ops_.LinearForward(
      activated_, weights.w(Role::kDown),
      /*bias=*/nullptr, tokens_, config_.intermediate, config_.hidden,
      /*residual=*/a.at(Segment::kMiddle), output, stream);
}

absl::Status Decoder::Backward(int64_t layer, int64_t micro_batch,
                               const UnitWeights& weights, ops::ConstAct input,
                               ops::Act d_hidden, OnFinal on_final,
                               device::Stream& stream) {
  const Places a = At({layer, micro_batch}, Pass::kBackward);
  const uint8_t missing = MissingInBackward(a.kept, config_.qk_norm);
  const uint8_t there = a.kept | missing;
  const ops::AttentionShape shape = Shape(layer, micro_batch);
  const bool add = micro_batch > 0;
  SDP_RETURN_IF_ERROR(Compute(missing, shape, a, weights, input, stream));
  SDP_RETURN_IF_ERROR(BackwardMlp(a, (there & Bit(Segment::kPostNorm)) != 0,
                                  weights, add, d_hidden, on_final, stream));
  return BackwardAttention(shape, a, (there & Bit(Segment::kInputNorm)) != 0,
                           weights, add, input, d_hidden, on_final, stream);
}

// The residual path carries d_hidden on unchanged. A norm that is not there is
// written by its backward pass over the gradient that this has consumed.
absl::Status Decoder::BackwardMlp(const Places& a, bool has_post_norm,
                                  const UnitWeights& weights, bool add,
                                  ops::Act d_hidden, OnFinal on_final,
                                  device::Stream& stream) {
  const int64_t h = config_.hidden;
  const int64_t inner = config_.intermediate;
  void* gate_up = a.at(Segment::kGateUp);
  SDP_RETURN_IF_ERROR(ops_.LinearBackwardInput(d_hidden, weights.w(Role::kDown),
                                               tokens_, inner, h, /*add=*/false,
                                               activated_, stream));
  // Both in place: gate_up becomes its gradient, the gradient of `activated`
  // becomes `activated`.
  SDP_RETURN_IF_ERROR(ops_.SwiGluBackward(gate_up, activated_, tokens_, inner,
                                          gate_up, activated_, stream));
  if (float* d_down = weights.d(Role::kDown)) {
    SDP_RETURN_IF_ERROR(ops_.LinearBackwardWeight(
        activated_, d_hidden, tokens_, inner, h, add, d_down, nullptr, stream));
  }
  SDP_RETURN_IF_ERROR(on_final(Role::kDown));
  SDP_RETURN_IF_ERROR(ops_.LinearBackwardInput(gate_up, weights.w(Role::kGate),
                                               tokens_, h, 2 * inner,
                                               /*add=*/false, d_norm_, stream));
  void* normed = has_post_norm ? a.at(Segment::kPostNorm) : d_norm_;
  SDP_RETURN_IF_ERROR(ops_.RmsNormBackward(
      a.at(Segment::kMiddle), weights.w(Role::kPostNorm), a.rstd2, d_norm_,
      tokens_, h, /*add=*/true, d_hidden, weights.d(Role::kPostNorm),
      has_post_norm ? nullptr : normed, stream));
  if (float* d_gate = weights.d(Role::kGate)) {
    SDP_RETURN_IF_ERROR(ops_.LinearBackwardWeight(
        normed, gate_up, tokens_, h, 2 * inner, add, d_gate, nullptr, stream));
  }
  return on_final(Role::kPostNorm);
}

absl::Status Decoder::BackwardAttention(const ops::AttentionShape& shape,
                                        const Places& a, bool has_input_norm,
                                        const UnitWeights& weights, bool add,
                                        ops::ConstAct input, ops::Act d_hidden,
                                        OnFinal on_final,
                                        device::Stream& stream) {
  const int64_t h = config_.hidden;
  if (float* d_o = weights.d(Role::kO)) {
    SDP_RETURN_IF_ERROR(ops_.LinearBackwardWeight(
        a.at(Segment::kAttention), d_hidden, tokens_, config_.q_dim(), h, add,
        d_o, nullptr, stream));
  }
  SDP_RETURN_IF_ERROR(on_final(Role::kO));
  SDP_RETURN_IF_ERROR(ops_.LinearBackwardInput(
      d_hidden, weights.w(Role::kO), tokens_, config_.q_dim(), h,
      /*add=*/false, d_attention_, stream));
  SDP_RETURN_IF_ERROR(
      ops_.AttentionBackward(a.at(Segment::kRotated), a.at(Segment::kAttention),
                             a.lse, d_attention_, shape, d_qkv_, stream));
  SDP_RETURN_IF_ERROR(ops_.QkNormRopeBackward(
      a.at(Segment::kQkv), weights.w(Role::kQNorm), weights.w(Role::kKNorm),
      rope_, shape, a.qk_rstd, d_qkv_, weights.d(Role::kQNorm),
      weights.d(Role::kKNorm), stream));
  SDP_RETURN_IF_ERROR(ops_.LinearBackwardInput(d_qkv_, weights.w(Role::kQ),
                                               tokens_, h, config_.qkv_dim(),
                                               /*add=*/false, d_norm_, stream));
  void* normed = has_input_norm ? a.at(Segment::kInputNorm) : d_norm_;
  SDP_RETURN_IF_ERROR(ops_.RmsNormBackward(
      input, weights.w(Role::kInputNorm), a.rstd1, d_norm_, tokens_, h,
      /*add=*/true, d_hidden, weights.d(Role::kInputNorm),
      has_input_norm ? nullptr : normed, stream));
  float* d_qkv_weight = weights.d(Role::kQ);
  if (d_qkv_weight == nullptr) return absl::OkStatus();
  return ops_.LinearBackwardWeight(normed, d_qkv_, tokens_, h,
                                   config_.qkv_dim(), add, d_qkv_weight,
                                   weights.d(Role::kQBias), stream);
}

}  // namespace slidedp::step
