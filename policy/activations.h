// Where everything lies that decoder layers keep between their forward and
// their backward passes: on the device for good, or in pinned host memory,
// passing through device slots ("staged").
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "common/model/config.h"
#include "policy/plan.h"

namespace slidedp::policy {

// Of an element of an activation.
uint64_t ActivationBytes(const Plan& plan);
// Of a micro-batch's input of a layer.
uint64_t InputBytes(const model::ModelConfig& config, const Plan& plan);

// The segments that a layer keeps. Without QK-norm the projections turn in
// place: kQkv then means kRotated, the only one of the two that exists.
uint8_t KeptSegments(const model::ModelConfig& config, const Plan& plan,
                     int64_t layer);
// A segment's output and statistics, of one micro-batch in one layer: what
// follows what, in bytes from a multiple of 256.
struct SegmentLayout {
  uint64_t output_bytes;
  uint64_t statistics_offset;  // kRotated: the norms' rstd; kAttention: lse
  uint64_t statistics_bytes;
  uint64_t bytes;  // a multiple of 256
};
SegmentLayout LayoutOf(const model::ModelConfig& config, const Plan& plan,
                       Segment segment);
// Device buffers of a segment: "layer.qkv", one micro-batch's scratch, if some
// layer does not keep it, and "kept.qkv": for each layer that keeps it and does
// not stage it, in ascending order, its micro-batches. "kept.rstd" has the two
// norms' rstd of layers that keep anything, likewise.
absl::string_view Name(Segment segment);  // "qkv"
std::string ScratchName(Segment segment);
std::string KeptName(Segment segment);

// What a layer keeps of a micro-batch, in parts. Parts 0 to kSegments - 1 are
// the segments, each with its statistics.
inline constexpr int kInputPart = kSegments;      // the layer's input; always
inline constexpr int kNormsPart = kSegments + 1;  // rstd of its two norms
inline constexpr int kParts = kSegments + 2;

// A part in one layer. Offsets are of micro-batch 0, in bytes.
struct PartPlace {
  uint64_t bytes = 0;       // of a micro-batch; 0: not kept
  uint64_t host_bytes = 0;  // the first so many wait in the pool
  // Not staged: in the part's own device buffer, `bytes` a micro-batch. Staged:
  // in a slot; an input's slots are its own, all other parts share one.
  uint64_t offset = 0;
  // Staged: of the first host_bytes in "pinned.activations", and of the others
  // in "kept.rest"; so many bytes a micro-batch.
  uint64_t pool_offset = 0, pool_stride = 0;
  uint64_t rest_offset = 0, rest_stride = 0;
  bool staged() const { return host_bytes > 0; }
};

struct ActivationLayout {
  std::vector<std::array<PartPlace, kParts>> layers;
  // Device buffers of the parts that are not staged: "inputs" (that of the
  // head comes last, at head_input_offset), "kept.rstd" and KeptName.
  std::array<uint64_t, kParts> resident_bytes = {};
  uint64_t head_input_offset = 0;
  // "stage.inputs" and "stage.kept"; 0 slots if nothing is staged.
  uint64_t input_slots = 0, input_slot_bytes = 0;
  uint64_t kept_slots = 0, kept_slot_bytes = 0;
  uint64_t pool_bytes = 0;  // "pinned.activations"
  uint64_t rest_bytes = 0;  // "kept.rest"
};

// Of what a layer keeps, the share Plan::offload_permille goes to the host: its
// input first, then its segments in order. One part at most is divided, at a
// multiple of 256 bytes.
ActivationLayout LayOutActivations(const model::ModelConfig& config,
                                   const Plan& plan);

}  // namespace slidedp::policy
