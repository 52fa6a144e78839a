// The devices on which the contract runs, defined once per test binary.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/device/device.h"

namespace slidedp::device {

struct DeviceBackend {
  std::string name;
  std::function<std::unique_ptr<Device>()> make;
};

std::vector<DeviceBackend> DeviceBackends();

}  // namespace slidedp::device
