#include "common/device/accelerator.h"

namespace slidedp::device {
namespace {

absl::Status NoCuda() {
  return absl::UnavailableError(
      "this build has no CUDA; use the CPU device, or a build configured with "
      "SLIDEDP_CUDA=ON");
}

}  // namespace

bool AcceleratorIsBuilt() { return false; }

void PrepareAcceleratorProcess() {}

absl::StatusOr<std::vector<AcceleratorInfo>> ListAccelerators() {
  return std::vector<AcceleratorInfo>();
}

absl::StatusOr<std::unique_ptr<Device>> NewAccelerator(
    const AcceleratorOptions& options) {
  return NoCuda();
}

absl::StatusOr<int> AcceleratorIndex(const Device& device) { return NoCuda(); }

absl::Status SetAcceleratorMemoryLimit(Device& device, size_t bytes) {
  return NoCuda();
}

absl::Status CheckAcceleratorStreams(Device& device) {
  return absl::OkStatus();  // the CPU device's streams are threads
}

absl::StatusOr<AcceleratorMemory> QueryAcceleratorMemory(Device& device) {
  return NoCuda();
}

}  // namespace slidedp::device
