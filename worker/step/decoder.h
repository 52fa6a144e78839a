// One decoder layer over one micro-batch, forward and backward. Formulas:
// models.md section 1.
//
// A layer's segments lie where its mask (policy::Plan::keep) says: those that
// are kept where Activations has them, the others in a scratch that all layers
// share. Forward writes each to its place, and backward computes again what it
// needs and does not find: from the layer's input alone if nothing is kept. The
// result is the same to the bit.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "common/device/device.h"
#include "common/model/config.h"
#include "policy/plan.h"
#include "worker/ops/ops.h"
#include "worker/step/activations.h"
#include "worker/step/buffers.h"
#include "worker/step/unit_weights.h"

namespace slidedp::step {

class Decoder {
 public:
  // `activations`: null if no layer keeps anything. `buffers`: the "layer."
  // ones of policy::DeviceBuffers, and "rope".
  Decoder(ops::Ops& ops, const model::ModelConfig& config,
          const policy::Plan& plan, const Activations* activations,
          const Buffers& buffers);

  // Of the micro-batches, one after another, for what is enqueued from now on:
  // ops::Documents' arrays, with Plan::micro_batch_documents() places. Null:
  // not packed, as after construction.
  void UseDocuments(const int32_t* first_rows, const int32_t* offsets) {
    first_rows_ = first_rows;
    offsets_ = offsets;
  }

  // output [tokens, hidden] = layer(input). Kept activations are in their
  // places between Activations::Begin and End.
  absl::Status Forward(int64_t layer, int64_t micro_batch,
                       const UnitWeights& weights, ops::ConstAct input,
                       ops::Act output, device::Stream& stream);
  // After Forward of the same layer and micro-batch; others may lie between.
  // d_hidden [tokens, hidden]: gradient of the layer's output on entry, of its
  // input on return. Matrices' gradients are written by micro-batch 0, which
  // comes first, and added to by the others; vectors' are added to.
  // `on_final(role)`: the micro-batch's part of the gradients of this tensor
  // and of those that lie behind it in the unit has been enqueued.
  using OnFinal = absl::FunctionRef<absl::Status(model::Role)>;
  static absl::Status Ignore(model::Role /*role*/) { return absl::OkStatus(); }
  absl::Status Backward(int64_t layer, int64_t micro_batch,
                        const UnitWeights& weights, ops::ConstAct input,
                        ops::Act d_hidden, OnFinal on_final,
                        device::Stream& stream);

 private:
  // Of one layer and micro-batch.
  struct Places {
    uint8_t kept;                          // mask of policy::Segment
    void* segments[policy::kSegments];     // by policy::Segment
    float *rstd1, *rstd2, *qk_rstd, *lse;  // statistics of the segments
    void* at(policy::Segment s) const { return segments[static_cast<int>(s)]; }
  };

  Places At(const Piece& piece, Pass pass) const;
  // The segments in `mask`, in order, each from what precedes it.
  absl::Status Compute(uint8_t mask, const ops::AttentionShape& shape,
                       const Places& a, const UnitWeights& weights,
                       ops::ConstAct input, device::Stream& stream);
  absl::Status BackwardMlp(const Places& a, bool has_post_norm,
                           const UnitWeights& weights, bool add,
                           ops::Act d_hidden, OnFinal on_final,
                           device::Stream& stream);
  absl::Status BackwardAttention(const ops::AttentionShape& shape,
                                 const Places& a, bool has_input_norm,
                                 const UnitWeights& weights, bool add,
                                 ops::ConstAct input, ops::Act d_hidden,
                                 OnFinal on_final, device::Stream& stream);
  ops::AttentionShape Shape(int64_t layer, int64_t micro_batch) const;

  ops::Ops& ops_;
  const model::ModelConfig& config_;
  const Activations* activations_;
  const int64_t batch_, sequence_, tokens_, documents_;
  const int32_t *first_rows_ = nullptr, *offsets_ = nullptr;
  std::vector<uint8_t> kept_;  // by layer
  void* scratch_[policy::kSegments];
  policy::SegmentLayout layouts_[policy::kSegments];
  float* rstd_;
  void *activated_, *d_norm_, *d_attention_, *d_qkv_;
  const float* rope_;
};

}  // namespace slidedp::step
