#include "common/base/status.h"
#include "common/collective/accelerator_collective.h"
#include "common/collective/cuda_peer_collective.h"
#include "common/collective/nccl_collective.h"

namespace slidedp::collective {

absl::StatusOr<std::string> NewAcceleratorCollectiveId() {
  return NewNcclUniqueId();
}

absl::StatusOr<AcceleratorCollective> NewAcceleratorCollective(
    device::Device& device, absl::string_view id, int rank, int world_size,
    size_t staging_bytes, int64_t deadline_ns) {
  SDP_ASSIGN_OR_RETURN(
      auto nccl, NewNcclCollective(device, id, rank, world_size, deadline_ns));
  SDP_ASSIGN_OR_RETURN(
      auto peers, NewPeerCollective(device, nccl, staging_bytes, deadline_ns));
  if (peers != nullptr) {
    PeerCollective* borrowed = peers.get();
    return AcceleratorCollective{std::move(peers),
                                 [borrowed] { return borrowed->Check(); }};
  }
  NcclCollective* borrowed = nccl.get();
  return AcceleratorCollective{std::move(nccl),
                               [borrowed] { return borrowed->Check(); }};
}

}  // namespace slidedp::collective
