#include <algorithm>

#include "common/base/units.h"
#include "policy/plan.h"

namespace slidedp::policy {

GradSchedule MakeGradSchedule(const model::StateLayout& layout,
                              const Plan& plan) {
  GradSchedule schedule;
  schedule.chunks.resize(plan.ranks);
  schedule.chunk_elements = plan.d2h_chunk_bytes / 2;
  auto add = [&](int rank, int unit, uint64_t begin, uint64_t end) {
    for (uint64_t at = begin; at < end; at += schedule.chunk_elements) {
      schedule.chunks[rank].push_back(
          {unit, at, std::min(schedule.chunk_elements, end - at)});
    }
  };
  for (int u = static_cast<int>(layout.units.size()) - 1; u >= 0; --u) {
    if (layout.units[u].frozen()) continue;
    const uint64_t count = layout.units[u].count;
    const GradRoute route = plan.routes(layout.units[u].kind).grads;
    const uint64_t shard = ShardElements(count, plan.ranks);
    for (int r = 0; r < plan.ranks; ++r) {
      switch (route) {
        case GradRoute::kGpuRoot:
          if (r == 0) add(r, u, 0, count);
          break;
        case GradRoute::kGpuSharded:
          add(r, u, std::min(r * shard, count),
              std::min((r + 1) * shard, count));
          break;
        case GradRoute::kCpu:
          add(r, u, 0, count);
          break;
      }
    }
  }
  uint64_t offset = 0;
  for (int r = 0; r < plan.ranks; ++r) {
    const uint64_t per_step = schedule.chunks[r].size();
    schedule.slots.push_back(plan.update_mode == UpdateMode::kEager
                                 ? std::min(plan.ring_chunks, per_step)
                                 : per_step);
    schedule.ring_offset_bytes.push_back(offset);
    offset +=
        AlignUp(schedule.slots[r] * schedule.chunk_elements * 2, kPageBytes);
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
