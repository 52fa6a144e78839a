#include "common/base/check.h"
#include "common/device/cuda_device.h"
#include "tests/contract/device_backends.h"

namespace slidedp::device {

std::vector<DeviceBackend> DeviceBackends() {
  return {{"cuda", [] {
             auto device = NewCudaDevice({});
             SDP_CHECK(device.ok(), device.status().message());
             return *std::move(device);
           }}};
}

}  // namespace slidedp::device
