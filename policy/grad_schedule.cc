#include <algorithm>
#include <iterator>

#include "common/base/units.h"
#include "policy/plan.h"

namespace slidedp::policy {

using model::Role;

std::vector<GradBucket> MakeGradBuckets(const model::StateLayout& layout,
                                        const Plan& plan) {
  const uint64_t alignment = plan.ranks * kShardAlignment;
  std::vector<GradBucket> buckets;
  for (int u = static_cast<int>(layout.units.size()) - 1; u >= 0; --u) {
    const model::Unit& unit = layout.units[u];
    if (unit.frozen()) continue;
    const bool host_sums =
        plan.routes(unit.kind).grads == GradRoute::kCpu && plan.ranks > 1;
    uint64_t end = unit.count;
    if (unit.kind == model::UnitKind::kDecoder && !host_sums) {
      for (Role role : {Role::kDown, Role::kPostNorm, Role::kO}) {
        if (!unit.has(role)) continue;
        const uint64_t cut = AlignUp(unit.tensor(role).offset, alignment);
        if (cut >= end) continue;
        buckets.push_back({u, cut, end});
        end = cut;
      }
    }
    buckets.push_back({u, 0, end});
  }
  return buckets;
}

GradShard ShardOf(const GradBucket& bucket, int rank, int ranks) {
  const uint64_t count = bucket.end - bucket.begin;
  const uint64_t shard = ShardElements(count, ranks);
  return {bucket.begin + std::min(rank * shard, count),
          bucket.begin + std::min((rank + 1) * shard, count)};
}

GradSchedule MakeGradSchedule(const model::StateLayout& layout,
                              const Plan& plan) {
  GradSchedule schedule;
  schedule.chunks.resize(plan.ranks);
  schedule.chunk_elements = plan.d2h_chunk_bytes / 2;
  schedule.buckets = MakeGradBuckets(layout, plan);
  auto add = [&](int rank, int bucket, uint64_t begin, uint64_t end) {
    for (uint64_t at = begin; at < end; at += schedule.chunk_elements) {
      schedule.chunks[rank].push_back(
          {bucket, schedule.buckets[bucket].unit, at,
           std::min(schedule.chunk_elements, end - at)});
    }
  };
  for (int b = 0; b < std::ssize(schedule.buckets); ++b) {
    const GradBucket& bucket = schedule.buckets[b];
    const GradRoute route = plan.routes(layout.units[bucket.unit].kind).grads;
    for (int r = 0; r < plan.ranks; ++r) {
      if (route == GradRoute::kGpuSharded) {
        const GradShard shard = ShardOf(bucket, r, plan.ranks);
        add(r, b, shard.begin, shard.end);
      } else if (route == GradRoute::kCpu || r == 0) {
        add(r, b, bucket.begin, bucket.end);
      }
    }
  }
  uint64_t offset = 0;
  for (int r = 0; r < plan.ranks; ++r) {
    const uint64_t per_step = schedule.chunks[r].size();
    const bool eager = plan.update_mode == UpdateMode::kEager;
    const uint64_t own = eager ? std::min(plan.own_chunks, per_step) : per_step;
    const uint64_t ring = std::min(plan.ring_chunks, per_step - own);
    schedule.own.push_back(own);
    schedule.ring.push_back(ring);
    std::vector<uint64_t>& offsets = schedule.slot_offsets.emplace_back();
    for (uint64_t slot = 0; slot < own + ring; ++slot) {
      offsets.push_back(offset);
      offset += AlignUp(2 * (slot < own ? schedule.chunks[r][slot].count
                                        : schedule.chunk_elements),
                        kCacheLineBytes);
    }
    offset = AlignUp(offset, kPageBytes);
  }
  schedule.grads_bytes = offset;
  return schedule;
}

uint64_t ReportedRows(const model::StateLayout& layout) {
  if (layout.tied()) return 0;
  const model::Unit& unit = layout.units[layout.embedding_unit()];
  if (!unit.has(model::Role::kEmbedding)) return 0;
  const model::Tensor& table = unit.tensor(model::Role::kEmbedding);
  return table.frozen ? 0 : table.shape[0];
}

bool DrainsUsedRows(const model::StateLayout& layout, const Plan& plan) {
  const bool host_sums =
      plan.embedding.grads == GradRoute::kCpu && plan.ranks > 1;
  return ReportedRows(layout) > 0 && !host_sums;
}

}  // namespace slidedp::policy
