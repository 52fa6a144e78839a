#include "hostd/store/bind.h"

#include <numaif.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "common/base/log.h"

namespace slidedp::hostd {

void BindToNode(const shm::Mapping& mapping, const PlacedRange& range,
                const Placement& placement) {
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  const int os_index = placement.nodes[range.node].os_index;
  std::vector<unsigned long> mask(os_index / kBits + 1);
  mask[os_index / kBits] |= 1ul << (os_index % kBits);
  // The kernel takes one bit less than it is told.
  if (mbind(mapping.at<char>(range.begin_bytes),
            range.end_bytes - range.begin_bytes, MPOL_PREFERRED, mask.data(),
            mask.size() * kBits + 1, 0) != 0) {
    spdlog::warn("memory can't be bound to NUMA node {}: {}", os_index,
                 std::strerror(errno));
  }
}

}  // namespace slidedp::hostd
