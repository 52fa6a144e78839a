#include "common/base/status.h"
#include "common/collective/accelerator_collective.h"
#include "common/collective/nccl_collective.h"

namespace slidedp::collective {

absl::StatusOr<std::string> NewAcceleratorCollectiveId() {
  return NewNcclUniqueId();
}

absl::StatusOr<AcceleratorCollective> NewAcceleratorCollective(
    device::Device& device, absl::string_view id, int rank, int world_size,
    int64_t deadline_ns) {
  SDP_ASSIGN_OR_RETURN(
      auto nccl, NewNcclCollective(device, id, rank, world_size, deadline_ns));
  NcclCollective* borrowed = nccl.get();
  return AcceleratorCollective{std::move(nccl),
                               [borrowed] { return borrowed->Check(); }};
}

}  // namespace slidedp::collective
