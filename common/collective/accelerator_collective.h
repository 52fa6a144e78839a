// The collective of GPU ranks, whatever this build supports (see
// common/device/accelerator.h).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/collective/collective.h"

namespace slidedp::collective {

// What rank 0 makes for one communicator and tells the other ranks.
absl::StatusOr<std::string> NewAcceleratorCollectiveId();

struct AcceleratorCollective {
  std::unique_ptr<Collective> collective;
  // From any thread: ok, or why the process must leave, without letting its
  // streams go on. To be called every second or so while steps run.
  std::function<absl::Status()> check;
};

// Waits for all ranks to call it, at most `deadline_ns`. GPUs that reach each
// other's memory exchange through `staging_bytes` of it.
absl::StatusOr<AcceleratorCollective> NewAcceleratorCollective(
    device::Device& device, absl::string_view id, int rank, int world_size,
    size_t staging_bytes, int64_t deadline_ns);

}  // namespace slidedp::collective
