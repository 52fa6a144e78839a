#include "tests/contract/device_backends.h"

namespace slidedp::device {

std::vector<DeviceBackend> DeviceBackends() {
  return {{"cpu", [] { return NewCpuDevice({}); }}};
}

}  // namespace slidedp::device
