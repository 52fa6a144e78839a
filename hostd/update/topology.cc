#include "hostd/update/topology.h"

#include <hwloc.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/log.h"

namespace slidedp::hostd {
namespace {

struct DestroyTopology {
  void operator()(hwloc_topology* t) const { hwloc_topology_destroy(t); }
};
using Topology = std::unique_ptr<hwloc_topology, DestroyTopology>;

// PCI: 0x0300 VGA, 0x0302 3D controller (what a data-centre GPU is).
using PciAttributes = decltype(hwloc_obj_attr_u::pcidev);

bool IsGpu(const PciAttributes& device) {
  return device.class_id == 0x0300 || device.class_id == 0x0302;
}

// First hardware thread of each core, then the second ones...
std::vector<int> CpusOf(hwloc_topology* topology, hwloc_const_cpuset_t set) {
  std::vector<std::pair<int, int>> cpus;  // rank in its core, OS index
  int pu;
  hwloc_bitmap_foreach_begin(pu, set) {
    hwloc_obj_t object = hwloc_get_pu_obj_by_os_index(topology, pu);
    if (object == nullptr) continue;
    hwloc_obj_t core =
        hwloc_get_ancestor_obj_by_type(topology, HWLOC_OBJ_CORE, object);
    int rank = 0;
    int other;
    if (core != nullptr) {
      hwloc_bitmap_foreach_begin(other, core->cpuset) {
        rank += other < pu && hwloc_bitmap_isset(set, other);
      }
      hwloc_bitmap_foreach_end();
    }
    cpus.emplace_back(rank, pu);
  }
  hwloc_bitmap_foreach_end();
  std::sort(cpus.begin(), cpus.end());
  std::vector<int> indexes;
  for (const auto& [rank, index] : cpus) indexes.push_back(index);
  return indexes;
}

HostTopology Read(hwloc_topology* topology, hwloc_const_cpuset_t usable) {
  HostTopology host;
  hwloc_bitmap_t set = hwloc_bitmap_alloc();
  for (hwloc_obj_t node = nullptr;
       (node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE,
                                          node)) != nullptr;) {
    hwloc_bitmap_and(set, node->cpuset, usable);
    const uint64_t bytes = node->attr->numanode.local_memory;
    if (hwloc_bitmap_iszero(set) || bytes == 0) continue;
    host.nodes.push_back(
        {static_cast<int>(node->os_index), bytes, CpusOf(topology, set)});
  }
  hwloc_bitmap_free(set);
  std::sort(host.nodes.begin(), host.nodes.end(),
            [](const NumaNode& a, const NumaNode& b) {
              return a.os_index < b.os_index;
            });

  for (hwloc_obj_t device = nullptr;
       (device = hwloc_get_next_pcidev(topology, device)) != nullptr;) {
    const PciAttributes& pci = device->attr->pcidev;
    if (!IsGpu(pci)) continue;
    HostTopology::Gpu gpu;
    gpu.pci_bus_id = absl::StrFormat("%04x:%02x:%02x.%x", pci.domain, pci.bus,
                                     pci.dev, pci.func);
    const hwloc_obj_t parent = hwloc_get_non_io_ancestor_obj(topology, device);
    const int os_index =
        parent != nullptr && hwloc_bitmap_weight(parent->nodeset) == 1
            ? hwloc_bitmap_first(parent->nodeset)
            : -1;
    gpu.node = host.PlaceOf(os_index);
    host.gpus.push_back(std::move(gpu));
  }
  std::sort(host.gpus.begin(), host.gpus.end(),
            [](const HostTopology::Gpu& a, const HostTopology::Gpu& b) {
              return a.pci_bus_id < b.pci_bus_id;
            });
  return host;
}

// `source` says where the topology comes from, in hwloc's calls.
absl::StatusOr<Topology> Load(const std::string& what,
                              absl::FunctionRef<int(hwloc_topology*)> source) {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) {
    return absl::InternalError("hwloc_topology_init");
  }
  Topology topology(raw);
  hwloc_topology_set_io_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
  if (source(raw) != 0 || hwloc_topology_load(raw) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": hwloc can't read it: ", std::strerror(errno)));
  }
  return topology;
}

HostTopology ReadAll(const Topology& topology) {
  return Read(topology.get(),
              hwloc_topology_get_allowed_cpuset(topology.get()));
}

}  // namespace

int HostTopology::PlaceOf(int os_index) const {
  for (size_t n = 0; n < nodes.size(); ++n) {
    if (nodes[n].os_index == os_index) return static_cast<int>(n);
  }
  return -1;
}

absl::StatusOr<HostTopology> DetectTopology() {
  absl::StatusOr<Topology> topology =
      Load("this host", [](hwloc_topology*) { return 0; });
  if (!topology.ok()) return topology.status();
  // hwloc knows of cpusets; a taskset is the process's own.
  hwloc_bitmap_t usable =
      hwloc_bitmap_dup(hwloc_topology_get_allowed_cpuset(topology->get()));
  hwloc_bitmap_t bound = hwloc_bitmap_alloc();
  if (hwloc_get_cpubind(topology->get(), bound, HWLOC_CPUBIND_PROCESS) == 0) {
    hwloc_bitmap_and(usable, usable, bound);
  }
  HostTopology host = Read(topology->get(), usable);
  hwloc_bitmap_free(bound);
  hwloc_bitmap_free(usable);
  return host;
}

absl::StatusOr<HostTopology> TopologyFromXml(const std::string& xml) {
  absl::StatusOr<Topology> topology =
      Load("topology XML", [&](hwloc_topology* t) {
        return hwloc_topology_set_xmlbuffer(t, xml.c_str(),
                                            static_cast<int>(xml.size()) + 1);
      });
  if (!topology.ok()) return topology.status();
  return ReadAll(*topology);
}

absl::StatusOr<HostTopology> TopologyFromSynthetic(const std::string& text) {
  absl::StatusOr<Topology> topology =
      Load(absl::StrCat("topology '", text, "'"), [&](hwloc_topology* t) {
        return hwloc_topology_set_synthetic(t, text.c_str());
      });
  if (!topology.ok()) return topology.status();
  return ReadAll(*topology);
}

Placement PlaceOnHost(const model::StateLayout& layout,
                      const policy::Plan& plan,
                      const std::vector<int>& rank_os_nodes) {
  const absl::StatusOr<HostTopology> host = DetectTopology();
  if (!host.ok()) {
    spdlog::warn("memory and update threads are not placed by NUMA node: {}",
                 std::string(host.status().message()));
    return {};
  }
  std::vector<int> rank_nodes;
  for (int os_index : rank_os_nodes) {
    rank_nodes.push_back(host->PlaceOf(os_index));
  }
  return MakePlacement(layout, plan, host->nodes, rank_nodes);
}

}  // namespace slidedp::hostd
