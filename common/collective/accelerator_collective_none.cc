#include "common/collective/accelerator_collective.h"

namespace slidedp::collective {
namespace {

absl::Status NoCuda() {
  return absl::UnavailableError("this build has no CUDA, and so no NCCL");
}

}  // namespace

absl::StatusOr<std::string> NewAcceleratorCollectiveId() { return NoCuda(); }

absl::StatusOr<AcceleratorCollective> NewAcceleratorCollective(
    device::Device& device, absl::string_view id, int rank, int world_size,
    size_t staging_bytes, int64_t deadline_ns) {
  return NoCuda();
}

}  // namespace slidedp::collective
