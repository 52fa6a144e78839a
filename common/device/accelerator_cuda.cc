#include "common/base/status.h"
#include "common/device/accelerator.h"
#include "common/device/cuda_device.h"

namespace slidedp::device {
namespace {

constexpr int64_t kStreamCheckDeadlineNs = 1'000'000'000;

}  // namespace

void PrepareAcceleratorProcess() { PrepareCudaProcess(); }

absl::StatusOr<std::unique_ptr<Device>> NewAccelerator(
    const AcceleratorOptions& options) {
  SDP_ASSIGN_OR_RETURN(const int count, CudaDeviceCount());
  if (count > 1 && options.rank >= count) {
    return absl::UnavailableError(absl::StrCat(
        "rank ", options.rank, " has no GPU: this process sees ", count,
        "; run fewer ranks, or check "
        "CUDA_VISIBLE_DEVICES"));
  }
  CudaOptions cuda;
  cuda.index = count == 1 ? 0 : options.rank;
  cuda.memory_limit_bytes = options.memory_limit_bytes;
  return NewCudaDevice(cuda);
}

absl::Status CheckAcceleratorStreams(Device& device) {
  if (device.kind() != Kind::kCuda) return absl::OkStatus();
  return CheckStreamIndependence(device, kStreamCheckDeadlineNs);
}

absl::StatusOr<AcceleratorMemory> QueryAcceleratorMemory(Device& device) {
  SDP_ASSIGN_OR_RETURN(const CudaMemory memory, QueryCudaMemory(device));
  return AcceleratorMemory{memory.used_peak_bytes, memory.total_bytes};
}

}  // namespace slidedp::device
