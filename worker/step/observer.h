// Shows what a stream has computed to a hook (see Hooks in trainer.h), on every
// device. For tests: a CUDA step stops for each look.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/statusor.h"
#include "common/device/device.h"

namespace slidedp::step {

class Observer {
 public:
  using Look = std::function<void(const float* values)>;

  // `capacity_bytes`: of the largest array to be looked at.
  static absl::StatusOr<Observer> Create(device::Device& device,
                                         uint64_t capacity_bytes);

  // `look` is called once with `count` values of `data` as they are at this
  // point of the stream, widened if they are BF16. CPU device: on the stream's
  // thread, when it gets there. CUDA: before this returns.
  absl::Status Show(const void* data, bool is_bf16, uint64_t count,
                    device::Stream& stream, Look look) const;

 private:
  explicit Observer(device::Device& device) : device_(&device) {}

  device::Device* device_;
  device::Buffer host_;  // pinned; empty on the CPU device
};

}  // namespace slidedp::step
