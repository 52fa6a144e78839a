#include "hostd/store/placement.h"

#include <algorithm>

#include "common/base/check.h"
#include "common/base/units.h"

namespace slidedp::hostd {
namespace {

bool EveryNodeHasARank(const std::vector<int>& rank_nodes, int ranks,
                       int nodes) {
  if (rank_nodes.size() != static_cast<size_t>(ranks)) return false;
  std::vector<bool> has(nodes);
  for (int node : rank_nodes) {
    if (node < 0 || node >= nodes) return false;
    has[node] = true;
  }
  return std::all_of(has.begin(), has.end(), [](bool b) { return b; });
}

}  // namespace

int Placement::NodeOf(int unit, uint64_t element) const {
  if (units.empty()) return 0;
  const std::vector<Part>& parts = units[unit];
  auto next = std::upper_bound(
      parts.begin(), parts.end(), element,
      [](uint64_t at, const Part& part) { return at < part.begin; });
  return std::prev(next)->node;  // the first part begins at 0
}

Placement MakePlacement(const model::StateLayout& layout,
                        const policy::Plan& plan,
                        const std::vector<NumaNode>& nodes,
                        const std::vector<int>& rank_nodes) {
  Placement placement;
  placement.nodes = nodes;
  if (nodes.size() <= 1) return placement;
  const int count = static_cast<int>(nodes.size());
  const bool by_rank = EveryNodeHasARank(rank_nodes, plan.ranks, count);
  const std::vector<policy::GradBucket> buckets =
      policy::MakeGradBuckets(layout, plan);
  for (const model::Unit& unit : layout.units) {
    std::vector<Placement::Part> parts;
    auto add = [&](uint64_t begin, int node) {
      begin = begin / kPartElements * kPartElements;
      if (begin >= unit.count && !parts.empty()) return;
      if (!parts.empty() && parts.back().begin == begin) {
        parts.back().node = node;
      } else if (parts.empty() || parts.back().node != node) {
        parts.push_back({begin, node});
      }
    };
    if (by_rank && !unit.frozen() &&
        plan.routes(unit.kind).grads == policy::GradRoute::kGpuSharded) {
      // Ascending: the schedule's order is descending.
      for (auto bucket = buckets.rbegin(); bucket != buckets.rend(); ++bucket) {
        if (&layout.units[bucket->unit] != &unit) continue;
        for (int r = 0; r < plan.ranks; ++r) {
          add(policy::ShardOf(*bucket, r, plan.ranks).begin, rank_nodes[r]);
        }
      }
    } else {
      const uint64_t part = CeilDiv(unit.count, count);
      for (int n = 0; n < count; ++n) add(n * part, n);
    }
    SDP_CHECK(parts[0].begin == 0, "a unit's first part");
    placement.units.push_back(std::move(parts));
  }
  return placement;
}

namespace {

// Appends, from the end of what is there; empty ranges vanish.
void Append(std::vector<PlacedRange>& ranges, uint64_t begin_bytes,
            uint64_t end_bytes, int node) {
  begin_bytes = AlignUp(begin_bytes, kPageBytes);
  end_bytes = AlignUp(end_bytes, kPageBytes);
  if (begin_bytes >= end_bytes) return;
  if (!ranges.empty() && ranges.back().node == node &&
      ranges.back().end_bytes == begin_bytes) {
    ranges.back().end_bytes = end_bytes;
  } else {
    ranges.push_back({begin_bytes, end_bytes, node});
  }
}

}  // namespace

std::vector<PlacedRange> PlacePlane(const model::StateLayout& layout,
                                    const Placement& placement,
                                    uint64_t offset_bytes,
                                    uint64_t element_bytes) {
  std::vector<PlacedRange> ranges;
  for (size_t u = 0; u < layout.units.size(); ++u) {
    const auto& parts = placement.units[u];
    const auto at = [&](uint64_t element) {
      return offset_bytes +
             (layout.units[u].plane_offset + element) * element_bytes;
    };
    for (size_t i = 0; i < parts.size(); ++i) {
      const uint64_t end =
          i + 1 < parts.size() ? parts[i + 1].begin : layout.units[u].count;
      Append(ranges, at(parts[i].begin), at(end), parts[i].node);
    }
  }
  return ranges;
}

std::vector<PlacedRange> PlaceGradients(const policy::GradSchedule& schedule,
                                        const Placement& placement) {
  std::vector<PlacedRange> ranges;
  for (size_t r = 0; r < schedule.chunks.size(); ++r) {
    const int rank = static_cast<int>(r);
    for (uint64_t i = 0; i < schedule.own[r]; ++i) {
      const policy::GradChunk& chunk = schedule.chunks[r][i];
      const uint64_t begin = schedule.slot_offset_bytes(rank, i);
      Append(ranges, begin, begin + chunk.count * 2,
             placement.NodeOf(chunk.unit, chunk.begin));
    }
  }
  return ranges;
}

}  // namespace slidedp::hostd
