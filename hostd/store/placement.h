// Which NUMA node holds which part of a job's planes and gradients. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "common/base/units.h"
#include "common/model/layout.h"
#include "policy/plan.h"

namespace slidedp::hostd {

// A node of the host that has memory and CPUs.
struct NumaNode {
  int os_index = 0;
  uint64_t memory_bytes = 0;
  // OS indexes, of those that this process may use; second hardware threads of
  // a core come after all first ones.
  std::vector<int> cpus;
};

struct Placement {
  // At most one: nothing is bound and no thread is pinned.
  std::vector<NumaNode> nodes;
  // A part of a unit, up to the next one's begin or the unit's end.
  struct Part {
    uint64_t begin;  // elements from the unit's start
    int node;        // place in `nodes`
  };
  std::vector<std::vector<Part>> units;

  int node_count() const {
    return nodes.empty() ? 1 : static_cast<int>(nodes.size());
  }
  int NodeOf(int unit, uint64_t element) const;
};

// Parts begin at multiples of this: a page of every plane.
inline constexpr uint64_t kPartElements = kPageBytes / 2;

// A unit whose gradient is drained in shards lies where the ranks' devices are:
// `rank_nodes` has each rank's place in `nodes`, -1 if unknown. Where a rank's
// node isn't known, a node has no rank (its memory is needed all the same) or
// the unit isn't drained in shards, the nodes get equal parts.
Placement MakePlacement(const model::StateLayout& layout,
                        const policy::Plan& plan,
                        const std::vector<NumaNode>& nodes,
                        const std::vector<int>& rank_nodes);

// Bytes of a segment, whole pages, and the node they belong to.
struct PlacedRange {
  uint64_t begin_bytes, end_bytes;
  int node;  // place in Placement::nodes
  bool operator==(const PlacedRange&) const = default;
};

// A plane that begins `offset_bytes` into its segment. Ascending; neighbours on
// one node are one range. The page where two parts meet goes with the first.
std::vector<PlacedRange> PlacePlane(const model::StateLayout& layout,
                                    const Placement& placement,
                                    uint64_t offset_bytes,
                                    uint64_t element_bytes);
// The ranks' rings, slot by slot where a slot holds the same chunk in every
// step. A smaller ring is nobody's: it stays in the caches.
std::vector<PlacedRange> PlaceGradients(const policy::GradSchedule& schedule,
                                        const Placement& placement);

}  // namespace slidedp::hostd
