// Exact bytes of a plan: host segments and device buffers.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/units.h"
#include "common/collective/exchange.h"
#include "common/shm/words.h"
#include "policy/activations.h"
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
  const GradSchedule schedule = MakeGradSchedule(layout, plan);
  std::vector<NamedBytes> segments = {
      {"params", 2 * layout.plane_elements},
      {"state", MakeStatePlanes(layout, plan).bytes},
      {"grads", schedule.grads_bytes},
      {"versions", shm::Versions::Bytes(plan.ranks, layout.units.size())},
      {"reports", shm::Reports::Bytes(plan.ranks, schedule.buckets.size(),
                                      ReportedRows(layout))},
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

std::vector<NamedBytes> DeviceBuffers(const model::ModelConfig& config,
                                      const model::StateLayout& layout,
                                      const Plan& plan) {
  const uint64_t a = ActivationBytes(plan);
  const uint64_t t = plan.micro_batch_tokens();
  const uint64_t m = plan.micro_batches;
  const uint64_t h = config.hidden;
  const uint64_t qkv = config.qkv_dim();
  const uint64_t inner = config.intermediate;
  std::vector<NamedBytes> list;
  auto add = [&list](std::string name, uint64_t bytes) {
    list.push_back({std::move(name), AlignUp(bytes, kPageBytes)});
  };
  // Largest of each kind: window slots, gradient accumulators and drains.
  uint64_t slot = 0, grad = 0, drain = 0, ends_grad = 0, ends_drain = 0;
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
    ends_grad = std::max(ends_grad, GradElements(unit, plan));
    ends_drain = std::max(ends_drain, DrainElements(unit, plan));
  }
  add("gradient.ends", 4 * ends_grad);
  add("drain.ends", 2 * ends_drain);
  for (int i = 0; i < plan.window_slots; ++i) {
    add(absl::StrCat("window.decoder.", i), 2 * slot);
  }
  for (int i = 0; i < plan.grad_slots; ++i) {
    add(absl::StrCat("gradient.decoder.", i), 4 * grad);
    add(absl::StrCat("drain.decoder.", i), 2 * drain);
  }
  if (DrainsUsedRows(layout, plan)) {  // of all ranks
    add("used_rows", plan.ranks * 8 * shm::RowWords(ReportedRows(layout)));
  }
  const uint64_t batch_bytes = 4 * plan.batch_ints();
  add("tokens", 2 * batch_bytes);         // of two steps
  add("pinned.tokens", 2 * batch_bytes);  // their staging, host memory
  // What layers keep of each micro-batch; a segment that some layer does not
  // keep is computed in a scratch.
  const ActivationLayout kept = LayOutActivations(config, plan);
  add("inputs", kept.resident_bytes[kInputPart]);
  add("d_hidden", m * t * h * a);
  for (int s = 0; s < kSegments; ++s) {
    const Segment segment = static_cast<Segment>(s);
    // The head's norm takes kInputNorm's.
    bool scratch = segment == Segment::kInputNorm;
    for (const auto& parts : kept.layers) scratch |= parts[s].bytes == 0;
    add(ScratchName(segment),
        scratch ? LayoutOf(config, plan, segment).bytes : 0);
    add(KeptName(segment), kept.resident_bytes[s]);
  }
  add("layer.rstd", 2 * t * 4);
  add("kept.rstd", kept.resident_bytes[kNormsPart]);
  add("stage.inputs", kept.input_slots * kept.input_slot_bytes);
  add("stage.kept", kept.kept_slots * kept.kept_slot_bytes);
  add("kept.rest", kept.rest_bytes);
  add("pinned.activations", kept.pool_bytes);
  add("layer.activated", t * inner * a);  // and its gradient
  add("layer.d_norm", t * h * a);
  add("layer.d_attention", t * config.q_dim() * a);
  add("layer.d_qkv", t * qkv * a);
  add("head.logits", plan.head_chunk_tokens * config.vocab * a);
  add("rope", config.head_dim / 2 * 4);
  // Loss sums of two steps, norms.
  add("scalars", 2 * 8 + MakeGradBuckets(layout, plan).size() * 8);
  if (plan.device == DeviceKind::kCpu) add("ops.scratch", kCpuScratchBytes);
  std::erase_if(list, [](const NamedBytes& b) { return b.bytes == 0; });
  return list;
}

}  // namespace slidedp::policy
