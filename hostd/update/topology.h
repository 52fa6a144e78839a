// The host's NUMA nodes and where its GPUs are, through hwloc.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "hostd/store/placement.h"

namespace slidedp::hostd {

struct HostTopology {
  // With memory and CPUs, ascending by OS index. Nodes that have only one of
  // both (memory expanders) are left out; CPUs without memory of their own
  // belong to the node that hwloc puts them under, if any.
  std::vector<NumaNode> nodes;
  struct Gpu {
    std::string pci_bus_id;  // "0000:41:00.0"
    int node;                // place in `nodes`; -1: not behind one of them
  };
  std::vector<Gpu> gpus;  // ascending by bus id

  // Place in `nodes` of an OS index; -1 if it isn't there.
  int PlaceOf(int os_index) const;
};

// Of this host, as far as this process may use it.
absl::StatusOr<HostTopology> DetectTopology();
// Of hosts that are not there: hwloc's XML export, or its synthetic notation
// ("node:2 core:4 pu:2").
absl::StatusOr<HostTopology> TopologyFromXml(const std::string& xml);
absl::StatusOr<HostTopology> TopologyFromSynthetic(const std::string& text);

// On this host. `rank_os_nodes`: OS index of the node each rank's device is at,
// -1 if unknown. A host that can't be read counts as one node, with a warning.
Placement PlaceOnHost(const model::StateLayout& layout,
                      const policy::Plan& plan,
                      const std::vector<int>& rank_os_nodes);

}  // namespace slidedp::hostd
