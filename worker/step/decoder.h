// One decoder layer over one micro-batch, forward and backward, from the
// layer's input alone (full-layer recompute). Formulas: models.md section 1.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "common/device/device.h"
#include "common/model/config.h"
#include "worker/ops/ops.h"
#include "worker/step/buffers.h"
#include "worker/step/unit_weights.h"

namespace slidedp::step {

class Decoder {
 public:
  Decoder(device::Device& device, ops::Ops& ops,
          const model::ModelConfig& config, int64_t batch, int64_t sequence,
          const Buffers& buffers);

  // output [tokens, hidden] = layer(input).
  absl::Status Forward(int64_t layer, const UnitWeights& weights,
                       ops::ConstAct input, ops::Act output,
                       device::Stream& stream);
  // d_hidden [tokens, hidden]: gradient of the layer's output on entry, of its
  // input on return. Weight gradients are added.
  absl::Status Backward(int64_t layer, const UnitWeights& weights,
                        ops::ConstAct input, ops::Act d_hidden,
                        device::Stream& stream);

 private:
  // Everything up to the down projection, kept in the layer's buffers.
  absl::Status Activate(int64_t layer, const UnitWeights& weights,
                        ops::ConstAct input, device::Stream& stream);
  ops::AttentionShape Shape(int64_t layer) const;

  device::Device& device_;
  ops::Ops& ops_;
  const model::ModelConfig& config_;
  int64_t batch_, sequence_, tokens_;
  void *norm1_, *qkv_, *rotated_, *attention_, *middle_, *norm2_, *gate_up_,
      *activated_, *d_norm_, *d_attention_, *d_qkv_, *d_activated_;
  float *rstd1_, *rstd2_, *qk_rstd_, *lse_;
  const float* rope_;
};

}  // namespace slidedp::step
