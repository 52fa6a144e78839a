// The device buffers of a plan, by the names that policy::DeviceBuffers gives
// them: allocated once, to the byte.
#pragma once

#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "common/device/device.h"
#include "policy/plan.h"

namespace slidedp::step {

class Buffers {
 public:
  static absl::StatusOr<Buffers> Allocate(
      device::Device& device, const std::vector<policy::NamedBytes>& list);

  // Null if the plan has no such buffer.
  template <typename T>
  T* get(const std::string& name) const {
    auto it = buffers_.find(name);
    return it == buffers_.end() ? nullptr : it->second.as<T>();
  }
  // Without what lies in pinned host memory.
  uint64_t device_bytes() const { return device_bytes_; }

 private:
  absl::flat_hash_map<std::string, device::Buffer> buffers_;
  uint64_t device_bytes_ = 0;
};

}  // namespace slidedp::step
