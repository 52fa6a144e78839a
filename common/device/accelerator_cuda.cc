#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/device/accelerator.h"
#include "common/device/cuda_device.h"
#include "common/device/cuda_status.h"

namespace slidedp::device {
namespace {

constexpr int64_t kStreamCheckDeadlineNs = 1'000'000'000;
constexpr char kRanksPerGpu[] = "SLIDEDP_RANKS_PER_GPU";
constexpr int kMostPerGpu = 8;

// A driver's device node, of a GPU or of WSL.
bool DriverIsThere() {
  return access("/dev/nvidiactl", F_OK) == 0 || access("/dev/dxg", F_OK) == 0;
}

// "GPU-01234567-89ab-...", "MIG-..." for a part of a GPU.
std::string UuidText(const cudaDeviceProp& properties) {
  std::string text =
      absl::StrContains(properties.name, " MIG ") ? "MIG" : "GPU";
  for (int i = 0; i < 16; ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    char hex[3];
    std::snprintf(hex, sizeof(hex), "%02x",
                  static_cast<unsigned char>(properties.uuid.bytes[i]));
    text += hex;
  }
  return text;
}

absl::StatusOr<int> RanksPerGpu() {
  const char* value = std::getenv(kRanksPerGpu);
  if (value == nullptr) return 1;
  int ranks = 0;
  if (!absl::SimpleAtoi(value, &ranks) || ranks < 1 || ranks > kMostPerGpu) {
    return absl::InvalidArgumentError(
        absl::StrCat("environment: ", kRanksPerGpu, ": \"", value,
                     "\": must be a number from 1 to ", kMostPerGpu,
                     "; set it for tests only, or unset it"));
  }
  return ranks;
}

absl::StatusOr<AcceleratorInfo> Describe(int index, int count) {
  cudaDeviceProp properties;
  SDP_RETURN_IF_CUDA_ERROR(cudaGetDeviceProperties(&properties, index));
  AcceleratorInfo info;
  info.name = absl::StrCat(properties.name, " (sm_", properties.major,
                           properties.minor, ")");
  info.uuid = UuidText(properties);
  info.memory_bytes = properties.totalGlobalMem;
  SDP_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(&info.numa_node, cudaDevAttrHostNumaId, index));
  for (int other = 0; other < count; ++other) {
    if (other == index) continue;
    int reaches = 0;
    SDP_RETURN_IF_CUDA_ERROR(cudaDeviceCanAccessPeer(&reaches, index, other));
    info.reaches_others &= reaches != 0;
  }
  return info;
}

}  // namespace

bool AcceleratorIsBuilt() { return true; }

void PrepareAcceleratorProcess() {
  PrepareCudaProcess();
  const absl::StatusOr<int> per_gpu = RanksPerGpu();
  if (per_gpu.ok() && *per_gpu > 1) {
    setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", /*overwrite=*/1);
  }
}

absl::StatusOr<std::vector<AcceleratorInfo>> ListAccelerators() {
  std::vector<AcceleratorInfo> list;
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorNoDevice ||
      (error == cudaErrorInsufficientDriver && !DriverIsThere())) {
    cudaGetLastError();
    return list;
  }
  if (error == cudaErrorInsufficientDriver) {
    cudaGetLastError();
    int runtime = 0;
    cudaRuntimeGetVersion(&runtime);
    return absl::UnavailableError(
        absl::StrCat("the NVIDIA driver does not load or is older than CUDA ",
                     runtime / 1000, " needs; install a newer driver"));
  }
  SDP_RETURN_IF_ERROR(CudaStatus(error, "cudaGetDeviceCount"));
  SDP_ASSIGN_OR_RETURN(const int per_gpu, RanksPerGpu());
  for (int entry = 0; entry < count * per_gpu; ++entry) {
    SDP_ASSIGN_OR_RETURN(AcceleratorInfo info, Describe(entry % count, count));
    info.memory_bytes /= per_gpu;
    list.push_back(std::move(info));
  }
  return list;
}

absl::StatusOr<std::unique_ptr<Device>> NewAccelerator(
    const AcceleratorOptions& options) {
  SDP_ASSIGN_OR_RETURN(const int count, CudaDeviceCount());
  SDP_ASSIGN_OR_RETURN(const int per_gpu, RanksPerGpu());
  if (count > 1 && options.rank >= count * per_gpu) {
    return absl::UnavailableError(absl::StrCat(
        "rank ", options.rank, " has no GPU: this process sees ", count,
        "; run fewer ranks, or check CUDA_VISIBLE_DEVICES"));
  }
  CudaOptions cuda;
  cuda.index = options.rank % count;
  cuda.memory_limit_bytes = options.memory_limit_bytes;
  return NewCudaDevice(cuda);
}

absl::StatusOr<int> AcceleratorIndex(const Device& device) {
  SDP_ASSIGN_OR_RETURN(const CudaProperties properties,
                       QueryCudaProperties(device));
  return properties.index;
}

absl::Status SetAcceleratorMemoryLimit(Device& device, size_t bytes) {
  return SetCudaMemoryLimit(device, bytes);
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
