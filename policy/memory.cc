// Exact bytes of a plan: host segments and device buffers.
#include <algorithm>
#include <array>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "common/base/units.h"
#include "common/collective/exchange.h"
#include "common/shm/words.h"
#include "policy/plan.h"

namespace slidedp::policy {
namespace {

using model::UnitKind;

// Elements of a device copy of the unit: shards are equal, so the last one may
// reach past the unit's end.
uint64_t SlotElements(const model::Unit& unit, const Plan& plan) {
  return plan.routes(unit.kind).params == ParamRoute::kSharded
             ? ShardElements(unit.count, plan.ranks) * plan.ranks
             : unit.count;
}

uint64_t GradElements(const model::Unit& unit, const Plan& plan) {
  return plan.routes(unit.kind).grads == GradRoute::kGpuSharded
             ? ShardElements(unit.count, plan.ranks) * plan.ranks
             : unit.count;
}

// BF16 gradients as they are reduced (BF16) or drained (FP32 reduction: only
// what this rank drains).
uint64_t DrainElements(const model::Unit& unit, const Plan& plan) {
  const Routes& routes = plan.routes(unit.kind);
  return routes.grads == GradRoute::kGpuSharded &&
                 routes.reduce == ReduceDType::kF32
             ? ShardElements(unit.count, plan.ranks)
             : GradElements(unit, plan);
}

constexpr const char* kSegmentNames[kSegments] = {
    "input_norm", "qkv",       "rotated", "attention",
    "middle",     "post_norm", "gate_up"};
// Of a micro-batch's part of a kept segment: what devices give to allocations.
constexpr uint64_t kSliceAlignment = 256;

uint64_t ActivationBytes(const Plan& plan) {
  return plan.float32 || plan.device == DeviceKind::kCpu ? 4 : 2;
}

}  // namespace

StatePlanes MakeStatePlanes(const model::StateLayout& layout,
                            const Plan& plan) {
  const uint64_t n = layout.plane_elements;
  StatePlanes planes;
  planes.lo = 0;
  planes.m = planes.lo + 2 * n;
  planes.v = planes.m + 4 * n;
  planes.reduced = planes.v + 4 * n;
  planes.bytes = planes.reduced;
  const bool deferred = plan.update_mode != UpdateMode::kEager;
  for (const Routes* r : {&plan.embedding, &plan.decoder, &plan.head}) {
    if (deferred && r->grads == GradRoute::kCpu) {
      planes.bytes = planes.reduced + 2 * n;
    }
  }
  return planes;
}

uint64_t ExchangeStagingBytes(const Plan& plan) {
  return plan.device == DeviceKind::kCpu && plan.ranks > 1 ? kMiB : 0;
}

std::vector<NamedBytes> HostSegments(const model::StateLayout& layout,
                                     const Plan& plan) {
  const uint64_t units = layout.units.size();
  std::vector<NamedBytes> segments = {
      {"params", 2 * layout.plane_elements},
      {"state", MakeStatePlanes(layout, plan).bytes},
      {"grads", MakeGradSchedule(layout, plan).grads_bytes},
      {"versions", shm::Versions::Bytes(plan.ranks, units)},
      {"reports", shm::Reports::Bytes(plan.ranks, units, ReportedRows(layout))},
  };
  if (const uint64_t staging = ExchangeStagingBytes(plan); staging > 0) {
    segments.push_back({"exchange", kCommunicators * collective::ExchangeBytes(
                                                         plan.ranks, staging)});
  }
  for (NamedBytes& segment : segments) {
    segment.bytes = AlignUp(segment.bytes, kPageBytes);
  }
  return segments;
}

uint64_t SegmentBytes(const std::vector<NamedBytes>& segments,
                      const std::string& name) {
  for (const NamedBytes& segment : segments) {
    if (segment.name == name) return segment.bytes;
  }
  return 0;
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

std::string ScratchName(Segment segment) {
  return absl::StrCat("layer.", kSegmentNames[static_cast<int>(segment)]);
}
std::string KeptName(Segment segment) {
  return absl::StrCat("kept.", kSegmentNames[static_cast<int>(segment)]);
}

std::vector<NamedBytes> DeviceBuffers(const model::ModelConfig& config,
                                      const model::StateLayout& layout,
                                      const Plan& plan) {
  const uint64_t a = ActivationBytes(plan);
  const uint64_t t = plan.micro_batch_tokens();
  const uint64_t m = plan.micro_batches;
  const uint64_t h = config.hidden;
  const uint64_t qkv = config.qkv_dim();
  const uint64_t inner = config.intermediate;
  const uint64_t units = layout.units.size();
  std::vector<NamedBytes> list;
  auto add = [&list](std::string name, uint64_t bytes) {
    list.push_back({std::move(name), AlignUp(bytes, kPageBytes)});
  };
  // Largest of each kind: window slots, gradient accumulators and drains.
  uint64_t slot = 0, grad = 0, drain = 0;
  for (const model::Unit& unit : layout.units) {
    if (unit.kind == UnitKind::kDecoder) {
      slot = std::max(slot, SlotElements(unit, plan));
      grad = std::max(grad, GradElements(unit, plan));
      drain = std::max(drain, DrainElements(unit, plan));
      continue;
    }
    const absl::string_view kind = model::UnitKindName(unit.kind);
    // An embedding that is no head is read where it lies, in host memory.
    if (&unit == &layout.units[layout.head_unit()]) {
      add(absl::StrCat("window.", kind), 2 * SlotElements(unit, plan));
    }
    add(absl::StrCat("gradient.", kind), 4 * GradElements(unit, plan));
    add(absl::StrCat("drain.", kind), 2 * DrainElements(unit, plan));
  }
  for (int i = 0; i < plan.window_slots; ++i) {
    add(absl::StrCat("window.decoder.", i), 2 * slot);
  }
  for (int i = 0; i < plan.grad_slots; ++i) {
    add(absl::StrCat("gradient.decoder.", i), 4 * grad);
    add(absl::StrCat("drain.decoder.", i), 2 * drain);
  }
  const uint64_t batch_bytes = 4 * plan.batch_ints();
  add("tokens", 2 * batch_bytes);         // of two steps
  add("pinned.tokens", 2 * batch_bytes);  // their staging, host memory
  add("inputs", (config.layers + 1) * m * t * h * a);  // of every layer
  add("d_hidden", m * t * h * a);
  // One micro-batch in one layer, and what layers keep of each.
  std::array<uint64_t, kSegments> keepers = {};
  uint64_t layers_that_keep = 0;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    const uint8_t kept = KeptSegments(config, plan, layer);
    layers_that_keep += kept != 0;
    for (int s = 0; s < kSegments; ++s) keepers[s] += kept >> s & 1;
  }
  for (int s = 0; s < kSegments; ++s) {
    const Segment segment = static_cast<Segment>(s);
    const uint64_t bytes = LayoutOf(config, plan, segment).bytes;
    // The head's norm takes kInputNorm's.
    const bool scratch = segment == Segment::kInputNorm ||
                         keepers[s] < static_cast<uint64_t>(config.layers);
    add(ScratchName(segment), scratch ? bytes : 0);
    add(KeptName(segment), keepers[s] * m * bytes);
  }
  add("layer.rstd", 2 * t * 4);
  add("kept.rstd", layers_that_keep * m * 2 * t * 4);
  add("layer.activated", t * inner * a);  // and its gradient
  add("layer.d_norm", t * h * a);
  add("layer.d_attention", t * config.q_dim() * a);
  add("layer.d_qkv", t * qkv * a);
  add("head.logits", plan.head_chunk_tokens * config.vocab * a);
  add("rope", config.head_dim / 2 * 4);
  add("scalars", 2 * 8 + units * 8);  // loss sums of two steps, unit norms
  if (plan.device == DeviceKind::kCpu) add("ops.scratch", kCpuScratchBytes);
  std::erase_if(list, [](const NamedBytes& b) { return b.bytes == 0; });
  return list;
}

}  // namespace slidedp::policy
