#include "worker/step/buffers.h"

#include <utility>

#include "absl/strings/match.h"
#include "common/base/status.h"

namespace slidedp::step {

absl::StatusOr<Buffers> Buffers::Allocate(
    device::Device& device, const std::vector<policy::NamedBytes>& list) {
  Buffers buffers;
  for (const policy::NamedBytes& item : list) {
    const bool pinned = absl::StartsWith(item.name, "pinned.");
    if (!pinned) buffers.device_bytes_ += item.bytes;
    if (item.name == "ops.scratch") continue;  // the ops' own
    const device::Memory where =
        pinned ? device::Memory::kPinnedHost : device::Memory::kDevice;
    SDP_ASSIGN_OR_RETURN(device::Buffer buffer,
                         device.Allocate(item.name, item.bytes, where));
    buffers.buffers_.emplace(item.name, std::move(buffer));
  }
  return buffers;
}

}  // namespace slidedp::step
