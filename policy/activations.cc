#include "policy/activations.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "common/base/units.h"

namespace slidedp::policy {
namespace {

constexpr const char* kSegmentNames[kSegments] = {
    "input_norm", "qkv",       "rotated", "attention",
    "middle",     "post_norm", "gate_up"};
// Of a micro-batch's part of a kept segment: what devices give to allocations.
constexpr uint64_t kSliceAlignment = 256;
// Of a cut, and of what begins in the pool: whole lines of the host's memory
// and of a GPU's copies.
constexpr uint64_t kCutAlignment = 256;

// In the order in which parts go to the host.
constexpr std::array<int, kParts> kHostOrder = [] {
  std::array<int, kParts> order = {kInputPart};
  for (int s = 0; s < kSegments; ++s) order[s + 1] = s;
  order[kParts - 1] = kNormsPart;
  return order;
}();

void Divide(uint64_t permille, std::array<PartPlace, kParts>& parts) {
  uint64_t total = 0;
  for (const PartPlace& part : parts) total += part.bytes;
  uint64_t left = permille >= 1000 ? total : total * permille / 1000;
  for (const int p : kHostOrder) {
    PartPlace& part = parts[p];
    part.host_bytes = std::min(part.bytes, left);
    left -= part.host_bytes;
    if (part.host_bytes < part.bytes) {
      part.host_bytes -= part.host_bytes % kCutAlignment;
      left = 0;
    }
  }
}

}  // namespace

uint64_t ActivationBytes(const Plan& plan) {
  return plan.float32 || plan.device == DeviceKind::kCpu ? 4 : 2;
}

uint64_t InputBytes(const model::ModelConfig& config, const Plan& plan) {
  return plan.micro_batch_tokens() * config.hidden * ActivationBytes(plan);
}

uint8_t KeptSegments(const model::ModelConfig& config, const Plan& plan,
                     int64_t layer) {
  if (layer >= std::ssize(plan.keep)) return 0;
  uint8_t kept = plan.keep[layer];
  if (!config.qk_norm && (kept & Bit(Segment::kQkv)) != 0) {
    kept = static_cast<uint8_t>((kept & ~Bit(Segment::kQkv)) |
                                Bit(Segment::kRotated));
  }
  return kept;
}

SegmentLayout LayoutOf(const model::ModelConfig& config, const Plan& plan,
                       Segment segment) {
  const uint64_t t = plan.micro_batch_tokens();
  uint64_t columns = 0, statistics = 0;
  switch (segment) {
    case Segment::kInputNorm:
    case Segment::kMiddle:
    case Segment::kPostNorm:
      columns = config.hidden;
      break;
    case Segment::kQkv:
      columns = config.qk_norm ? config.qkv_dim() : 0;
      break;
    case Segment::kRotated:
      columns = config.qkv_dim();
      statistics = config.qk_norm ? config.heads + config.kv_heads : 0;
      break;
    case Segment::kAttention:
      columns = config.q_dim();
      statistics = config.heads;
      break;
    case Segment::kGateUp:
      columns = 2 * config.intermediate;
      break;
  }
  SegmentLayout layout;
  layout.output_bytes = t * columns * ActivationBytes(plan);
  layout.statistics_offset = AlignUp(layout.output_bytes, kSliceAlignment);
  layout.statistics_bytes = t * statistics * 4;
  layout.bytes = AlignUp(layout.statistics_offset + layout.statistics_bytes,
                         kSliceAlignment);
  return layout;
}

absl::string_view Name(Segment segment) {
  return kSegmentNames[static_cast<int>(segment)];
}
std::string ScratchName(Segment segment) {
  return absl::StrCat("layer.", Name(segment));
}
std::string KeptName(Segment segment) {
  return absl::StrCat("kept.", Name(segment));
}

ActivationLayout LayOutActivations(const model::ModelConfig& config,
                                   const Plan& plan) {
  const uint64_t m = plan.micro_batches;
  ActivationLayout layout;
  layout.layers.resize(config.layers);
  const uint64_t input_bytes = InputBytes(config, plan);
  for (int64_t l = 0; l < config.layers; ++l) {
    std::array<PartPlace, kParts>& parts = layout.layers[l];
    const uint8_t kept = KeptSegments(config, plan, l);
    parts[kInputPart].bytes = input_bytes;
    for (int s = 0; s < kSegments; ++s) {
      if ((kept >> s & 1) == 0) continue;
      parts[s].bytes = LayoutOf(config, plan, static_cast<Segment>(s)).bytes;
    }
    if (kept != 0) parts[kNormsPart].bytes = plan.micro_batch_tokens() * 2 * 4;
    Divide(l < std::ssize(plan.offload_permille) ? plan.offload_permille[l] : 0,
           parts);
    uint64_t slot = 0;
    for (int p = 0; p < kParts; ++p) {
      PartPlace& part = parts[p];
      if (!part.staged()) {
        part.offset = layout.resident_bytes[p];
        layout.resident_bytes[p] += m * part.bytes;
        continue;
      }
      part.pool_offset = layout.pool_bytes;
      part.pool_stride = AlignUp(part.host_bytes, kCutAlignment);
      layout.pool_bytes += m * part.pool_stride;
      part.rest_offset = layout.rest_bytes;
      part.rest_stride = AlignUp(part.bytes - part.host_bytes, kCutAlignment);
      layout.rest_bytes += m * part.rest_stride;
      if (p == kInputPart) {
        layout.input_slots = m + plan.stage_slots;
        layout.input_slot_bytes = input_bytes;
        continue;
      }
      part.offset = slot;
      slot += AlignUp(part.bytes, kCutAlignment);
    }
    if (slot == 0) continue;
    layout.kept_slots = plan.stage_slots;
    layout.kept_slot_bytes = std::max(layout.kept_slot_bytes, slot);
  }
  layout.head_input_offset = layout.resident_bytes[kInputPart];
  layout.resident_bytes[kInputPart] += m * input_bytes;
  return layout;
}

}  // namespace slidedp::policy
