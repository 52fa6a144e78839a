// The job's segments, registered for asynchronous copies.
#include <algorithm>

#include "common/base/status.h"
#include "worker/step/trainer_impl.h"

namespace slidedp::step {
namespace {

// Registered at once; larger mappings go piece by piece (gpu-facts: one call of
// 512 GiB or more fails).
constexpr uint64_t kRegistrationBytes = uint64_t{4} << 30;

}  // namespace

absl::Status TrainerImpl::Register(const shm::Mapping& mapping,
                                   bool read_only) {
  for (uint64_t at = 0; at < mapping.bytes(); at += kRegistrationBytes) {
    SDP_ASSIGN_OR_RETURN(
        auto registration,
        in_.device->RegisterHost(
            mapping.at<char>(at),
            std::min(kRegistrationBytes, mapping.bytes() - at), read_only));
    registrations_.push_back(std::move(registration));
  }
  return absl::OkStatus();
}

absl::Status TrainerImpl::RegisterSegments() {
  SDP_RETURN_IF_ERROR(Register(*in_.params, /*read_only=*/true));
  SDP_RETURN_IF_ERROR(Register(*in_.versions, /*read_only=*/true));
  SDP_RETURN_IF_ERROR(Register(*in_.grads, /*read_only=*/false));
  return Register(*in_.reports, /*read_only=*/false);
}

}  // namespace slidedp::step
