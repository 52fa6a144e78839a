#include "worker/step/decoder.h"

#include "common/base/status.h"

namespace slidedp::step {

using model::Role;

Decoder::Decoder(device::Device& device, ops::Ops& ops,
                 const model::ModelConfig& config, int64_t batch,
                 int64_t sequence, const Buffers& buffers)
    : device_(device),
      ops_(ops),
      config_(config),
      batch_(batch),
      sequence_(sequence),
      tokens_(batch * sequence),
      norm1_(buffers.get<void>("layer.norm1")),
      qkv_(buffers.get<void>("layer.qkv")),
      rotated_(buffers.get<void>("layer.qkv_rotated")),
      attention_(buffers.get<void>("layer.attention")),
      middle_(buffers.get<void>("layer.middle")),
      norm2_(buffers.get<void>("layer.norm2")),
      gate_up_(buffers.get<void>("layer.gate_up")),
      activated_(buffers.get<void>("layer.activated")),
      d_norm_(buffers.get<void>("layer.d_norm")),
      d_attention_(buffers.get<void>("layer.d_attention")),
      d_qkv_(buffers.get<void>("layer.d_qkv")),
      d_activated_(buffers.get<void>("layer.d_activated")),
      rstd1_(buffers.get<float>("layer.rstd")),
      rstd2_(rstd1_ + tokens_),
      qk_rstd_(buffers.get<float>("layer.qk_rstd")),
      lse_(buffers.get<float>("layer.lse")),
      rope_(buffers.get<float>("rope")) {}

ops::AttentionShape Decoder::Shape(int64_t layer) const {
  return {batch_,           sequence_,        config_.heads,
          config_.kv_heads, config_.head_dim, config_.window[layer]};
}

absl::Status Decoder::Activate(int64_t layer, const UnitWeights& weights,
                               ops::ConstAct input, device::Stream& stream) {
  const int64_t h = config_.hidden;
  const int64_t inner = config_.intermediate;
  const ops::AttentionShape shape = Shape(layer);
  SDP_RETURN_IF_ERROR(ops_.RmsNormForward(input, weights.w(Role::kInputNorm),
                                          tokens_, h, config_.rms_eps, norm1_,
                                          rstd1_, stream));
  SDP_RETURN_IF_ERROR(ops_.LinearForward(
      norm1_, weights.w(Role::kQ), weights.w(Role::kQBias), tokens_, h,
      config_.qkv_dim(), /*add=*/false, qkv_, stream));
  SDP_RETURN_IF_ERROR(ops_.QkNormRopeForward(
      qkv_, weights.w(Role::kQNorm), weights.w(Role::kKNorm), config_.rms_eps,
      rope_, shape, rotated_, qk_rstd_, stream));
  SDP_RETURN_IF_ERROR(
      ops_.AttentionForward(rotated_, shape, attention_, lse_, stream));
  SDP_RETURN_IF_ERROR(
      device_.Copy(middle_, input, tokens_ * h * ops_.act_bytes(), stream));
  SDP_RETURN_IF_ERROR(ops_.LinearForward(attention_, weights.w(Role::kO),
                                         nullptr, tokens_, config_.q_dim(), h,
                                         /*add=*/true, middle_, stream));
  SDP_RETURN_IF_ERROR(ops_.RmsNormForward(middle_, weights.w(Role::kPostNorm),
                                          tokens_, h, config_.rms_eps, norm2_,
                                          rstd2_, stream));
  SDP_RETURN_IF_ERROR(ops_.LinearForward(norm2_, weights.w(Role::kGate),
                                         nullptr, tokens_, h, 2 * inner,
                                         /*add=*/false, gate_up_, stream));
  return ops_.SwiGluForward(gate_up_, tokens_, inner, activated_, stream);
}

absl::Status Decoder::Forward(int64_t layer, const UnitWeights& weights,
                              ops::ConstAct input, ops::Act output,
                              device::Stream& stream) {
  const int64_t h = config_.hidden;
  SDP_RETURN_IF_ERROR(Activate(layer, weights, input, stream));
  SDP_RETURN_IF_ERROR(
      device_.Copy(output, middle_, tokens_ * h * ops_.act_bytes(), stream));
  return ops_.LinearForward(activated_, weights.w(Role::kDown), nullptr,
                            tokens_, config_.intermediate, h, /*add=*/true,
                            output, stream);
}

absl::Status Decoder::Backward(int64_t layer, const UnitWeights& weights,
                               ops::ConstAct input, ops::Act d_hidden,
                               device::Stream& stream) {
  const int64_t h = config_.hidden;
  const int64_t inner = config_.intermediate;
  const ops::AttentionShape shape = Shape(layer);
  SDP_RETURN_IF_ERROR(Activate(layer, weights, input, stream));

  // MLP. The residual path carries d_hidden on unchanged.
  SDP_RETURN_IF_ERROR(
      ops_.LinearBackwardWeight(activated_, d_hidden, tokens_, inner, h,
                                weights.d(Role::kDown), nullptr, stream));
  SDP_RETURN_IF_ERROR(ops_.LinearBackwardInput(d_hidden, weights.w(Role::kDown),
                                               tokens_, inner, h, /*add=*/false,
                                               d_activated_, stream));
  SDP_RETURN_IF_ERROR(ops_.SwiGluBackward(gate_up_, d_activated_, tokens_,
                                          inner, gate_up_, stream));
  SDP_RETURN_IF_ERROR(
      ops_.LinearBackwardWeight(norm2_, gate_up_, tokens_, h, 2 * inner,
                                weights.d(Role::kGate), nullptr, stream));
  SDP_RETURN_IF_ERROR(ops_.LinearBackwardInput(gate_up_, weights.w(Role::kGate),
                                               tokens_, h, 2 * inner,
                                               /*add=*/false, d_norm_, stream));
  SDP_RETURN_IF_ERROR(ops_.RmsNormBackward(
      middle_, weights.w(Role::kPostNorm), rstd2_, d_norm_, tokens_, h,
      /*add=*/true, d_hidden, weights.d(Role::kPostNorm), stream));

  // Attention.
  SDP_RETURN_IF_ERROR(
      ops_.LinearBackwardWeight(attention_, d_hidden, tokens_, config_.q_dim(),
                                h, weights.d(Role::kO), nullptr, stream));
  SDP_RETURN_IF_ERROR(ops_.LinearBackwardInput(
      d_hidden, weights.w(Role::kO), tokens_, config_.q_dim(), h,
      /*add=*/false, d_attention_, stream));
  SDP_RETURN_IF_ERROR(ops_.AttentionBackward(
      rotated_, attention_, lse_, d_attention_, shape, d_qkv_, stream));
  SDP_RETURN_IF_ERROR(ops_.QkNormRopeBackward(
      qkv_, weights.w(Role::kQNorm), weights.w(Role::kKNorm), rope_, shape,
      qk_rstd_, d_qkv_, weights.d(Role::kQNorm), weights.d(Role::kKNorm),
      stream));
  SDP_RETURN_IF_ERROR(ops_.LinearBackwardWeight(
      norm1_, d_qkv_, tokens_, h, config_.qkv_dim(), weights.d(Role::kQ),
      weights.d(Role::kQBias), stream));
  SDP_RETURN_IF_ERROR(ops_.LinearBackwardInput(d_qkv_, weights.w(Role::kQ),
                                               tokens_, h, config_.qkv_dim(),
                                               /*add=*/false, d_norm_, stream));
  return ops_.RmsNormBackward(input, weights.w(Role::kInputNorm), rstd1_,
                              d_norm_, tokens_, h, /*add=*/true, d_hidden,
                              weights.d(Role::kInputNorm), stream);
}

}  // namespace slidedp::step
