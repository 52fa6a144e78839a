#include "worker/bench/machine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/device/accelerator.h"
#include "worker/ops/accelerator_ops.h"

namespace slidedp::bench {
namespace {

// Contents repeat after so many values.
constexpr uint64_t kPatternElements = uint64_t{1} << 20;

}  // namespace

absl::StatusOr<std::unique_ptr<Machine>> Machine::Create(
    const MachineOptions& options) {
  std::unique_ptr<Machine> machine(new Machine(options));
  SDP_RETURN_IF_ERROR(machine->Init());
  return machine;
}

Machine::~Machine() = default;

absl::Status Machine::Init() {
  if (options_.device != "cpu") {
    device::AcceleratorOptions accelerator;
    accelerator.rank = options_.gpu;
    accelerator.memory_limit_bytes = static_cast<size_t>(
        options_.gpu_memory_limit_gib * (uint64_t{1} << 30));
    absl::StatusOr<std::unique_ptr<device::Device>> gpu =
        device::NewAccelerator(accelerator);
    if (gpu.ok()) {
      device_ = *std::move(gpu);
      SDP_ASSIGN_OR_RETURN(
          ops_, ops::NewAcceleratorOps(
                    *device_, {.deterministic = options_.deterministic}));
    } else if (options_.device == "cuda") {
      return gpu.status();
    }
  }
  if (device_ == nullptr) {
    device_ = device::NewCpuDevice({});
    ops_ = ops::NewCpuOps(options_.threads);
  }
  name_ = device_->description();
  SDP_ASSIGN_OR_RETURN(
      staging_, device_->Allocate("staging", kPatternElements * sizeof(float),
                                  device::Memory::kPinnedHost));
  SDP_ASSIGN_OR_RETURN(begin_, device_->NewEvent());
  SDP_ASSIGN_OR_RETURN(end_, device_->NewEvent());
  SDP_ASSIGN_OR_RETURN(stream_, device_->NewStream("bench"));
  return absl::OkStatus();
}

absl::StatusOr<void*> Machine::Zeros(const std::string& name, uint64_t bytes) {
  SDP_ASSIGN_OR_RETURN(device::Buffer buffer,
                       device_->Allocate(name, bytes, device::Memory::kDevice));
  buffers_.push_back(std::move(buffer));
  return buffers_.back().data();
}

absl::StatusOr<void*> Machine::Activations(const std::string& name,
                                           uint64_t count, float deviation) {
  SDP_ASSIGN_OR_RETURN(void* data, Zeros(name, count * ops_->act_bytes()));
  SDP_RETURN_IF_ERROR(
      FillNormal(data, count, ops_->activation_dtype() == ops::ActDType::kBf16,
                 deviation));
  return data;
}

absl::StatusOr<bf16*> Machine::Weights(const std::string& name, uint64_t count,
                                       float deviation) {
  SDP_ASSIGN_OR_RETURN(void* data, Zeros(name, count * sizeof(bf16)));
  SDP_RETURN_IF_ERROR(FillNormal(data, count, true, deviation));
  return static_cast<bf16*>(data);
}

absl::Status Machine::FillNormal(void* data, uint64_t count, bool bf16_values,
                                 float deviation) {
  std::mt19937_64 engine(count);
  std::normal_distribution<float> normal(0, deviation);
  const uint64_t elements = std::min(count, kPatternElements);
  for (uint64_t i = 0; i < elements; ++i) {
    const float value = normal(engine);
    if (bf16_values) {
      staging_.as<bf16>()[i] = FloatToBf16Even(value);
    } else {
      staging_.as<float>()[i] = value;
    }
  }
  const uint64_t size = bf16_values ? sizeof(bf16) : sizeof(float);
  return FillPattern(data, count * size, staging_.data(), elements * size);
}

absl::Status Machine::FillOnes(bf16* data, uint64_t count) {
  const uint64_t elements = std::min(count, kPatternElements);
  std::fill_n(staging_.as<bf16>(), elements, FloatToBf16Even(1.0f));
  return FillPattern(data, count * sizeof(bf16), staging_.data(),
                     elements * sizeof(bf16));
}

absl::Status Machine::FillPattern(void* data, uint64_t bytes,
                                  const void* pattern, uint64_t pattern_bytes) {
  for (uint64_t at = 0; at < bytes; at += pattern_bytes) {
    SDP_RETURN_IF_ERROR(device_->Copy(static_cast<char*>(data) + at, pattern,
                                      std::min(pattern_bytes, bytes - at),
                                      *stream_));
  }
  return device_->Synchronize(*stream_);
}

absl::StatusOr<int32_t*> Machine::Integers(const std::string& name,
                                           const std::vector<int32_t>& values) {
  SDP_ASSIGN_OR_RETURN(void* data,
                       Zeros(name, values.size() * sizeof(int32_t)));
  for (uint64_t at = 0; at < values.size(); at += kPatternElements) {
    const uint64_t count =
        std::min<uint64_t>(kPatternElements, values.size() - at);
    std::memcpy(staging_.data(), values.data() + at, count * sizeof(int32_t));
    SDP_RETURN_IF_ERROR(device_->Copy(static_cast<int32_t*>(data) + at,
                                      staging_.data(), count * sizeof(int32_t),
                                      *stream_));
    SDP_RETURN_IF_ERROR(device_->Synchronize(*stream_));
  }
  return static_cast<int32_t*>(data);
}

absl::Status Machine::WarmUp(const std::function<absl::Status()>& rehearsal) {
  if (!is_gpu()) return absl::OkStatus();
  SDP_RETURN_IF_ERROR(ops::WarmUpAcceleratorOps(*ops_, rehearsal));
  return device_->Synchronize(*stream_);
}

absl::StatusOr<double> Machine::SecondsOnce(
    const std::function<absl::Status()>& work) {
  SDP_RETURN_IF_ERROR(device_->Record(*begin_, *stream_));
  SDP_RETURN_IF_ERROR(work());
  SDP_RETURN_IF_ERROR(device_->Record(*end_, *stream_));
  SDP_RETURN_IF_ERROR(device_->Synchronize(*stream_));
  SDP_ASSIGN_OR_RETURN(const int64_t begin_ns, device_->TimestampNs(*begin_));
  SDP_ASSIGN_OR_RETURN(const int64_t end_ns, device_->TimestampNs(*end_));
  return static_cast<double>(end_ns - begin_ns) * 1e-9;
}

absl::StatusOr<double> Machine::Seconds(
    const std::function<absl::Status()>& work,
    const std::function<absl::Status()>& prepare, int max_repeats) {
  if (prepare) SDP_RETURN_IF_ERROR(prepare());
  SDP_RETURN_IF_ERROR(SecondsOnce(work).status());
  SDP_ASSIGN_OR_RETURN(const double once, SecondsOnce(work));
  const int repeats = once <= 0 ? max_repeats
                                : static_cast<int>(std::clamp(
                                      std::ceil(options_.sample_seconds / once),
                                      1.0, static_cast<double>(max_repeats)));
  std::vector<double> seconds;
  for (int i = 0; i < std::max(1, options_.samples); ++i) {
    if (prepare) SDP_RETURN_IF_ERROR(prepare());
    SDP_ASSIGN_OR_RETURN(const double sample,
                         SecondsOnce([&]() -> absl::Status {
                           for (int r = 0; r < repeats; ++r) {
                             SDP_RETURN_IF_ERROR(work());
                           }
                           return absl::OkStatus();
                         }));
    seconds.push_back(sample / repeats);
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

uint64_t Machine::workspace_bytes() const {
  return device_->kind() == device::Kind::kCuda
             ? ops::AcceleratorOpsWorkspaceBytes(*ops_)
             : 0;
}

absl::StatusOr<uint64_t> Machine::memory_bytes() {
  if (!is_gpu()) return uint64_t{0};
  SDP_ASSIGN_OR_RETURN(const device::AcceleratorMemory memory,
                       device::QueryAcceleratorMemory(*device_));
  return memory.total_bytes;
}

}  // namespace slidedp::bench
