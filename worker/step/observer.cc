#include "worker/step/observer.h"

#include <utility>
#include <vector>

#include "common/base/bf16.h"
#include "common/base/check.h"
#include "common/base/status.h"

namespace slidedp::step {

absl::StatusOr<Observer> Observer::Create(device::Device& device,
                                          uint64_t capacity_bytes) {
  Observer observer(device);
  if (device.kind() != device::Kind::kCpu) {
    SDP_ASSIGN_OR_RETURN(
        observer.host_,
        device.Allocate("hooks", capacity_bytes, device::Memory::kPinnedHost));
  }
  return observer;
}

absl::Status Observer::Show(const void* data, bool is_bf16, uint64_t count,
                            device::Stream& stream, Look look) const {
  if (device_->kind() == device::Kind::kCpu) {
    SDP_CHECK(!is_bf16, "a CPU device has float32 values only");
    return device::EnqueueOnCpu(stream, [look = std::move(look), data] {
      look(static_cast<const float*>(data));
      return absl::OkStatus();
    });
  }
  const uint64_t bytes = count * (is_bf16 ? sizeof(uint16_t) : sizeof(float));
  SDP_CHECK(bytes <= host_.bytes(), "larger than what was announced");
  SDP_RETURN_IF_ERROR(device_->Copy(host_.data(), data, bytes, stream));
  SDP_RETURN_IF_ERROR(device_->Synchronize(stream));
  if (!is_bf16) {
    look(host_.as<float>());
    return absl::OkStatus();
  }
  std::vector<float> wide(count);
  for (uint64_t i = 0; i < count; ++i) {
    wide[i] = Bf16ToFloat(host_.as<uint16_t>()[i]);
  }
  look(wide.data());
  return absl::OkStatus();
}

}  // namespace slidedp::step
