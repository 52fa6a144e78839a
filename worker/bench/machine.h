// One device with its ops, operands with random contents, and time. Shared by
// the subcommands of slidedp-bench-ops.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/bf16.h"
#include "common/device/device.h"
#include "worker/ops/ops.h"

namespace slidedp::bench {

// Of random operands.
inline constexpr float kWeightDeviation = 0.02f;
inline constexpr float kGradientDeviation = 1e-3f;

struct MachineOptions {
  std::string device = "auto";  // cuda where there is a GPU, else cpu
  int threads = 1;              // of the CPU device
  int gpu = 0;                  // which of those visible
  double gpu_memory_limit_gib = 0;
  bool deterministic = false;
  // Each figure is the median of so many samples, each at least so long.
  int samples = 5;
  double sample_seconds = 0.1;
};

// Thread-compatible. Operands live as long as the machine.
class Machine {
 public:
  static absl::StatusOr<std::unique_ptr<Machine>> Create(
      const MachineOptions& options);
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  device::Device& device() { return *device_; }
  ops::Ops& ops() { return *ops_; }
  device::Stream& stream() { return *stream_; }
  const std::string& name() const { return name_; }
  bool is_gpu() const { return device_->kind() == device::Kind::kCuda; }

  // Zero.
  absl::StatusOr<void*> Zeros(const std::string& name, uint64_t bytes);
  // Normal values of this deviation: the power, and so the clock, of a GPU
  // depends on what is multiplied.
  absl::StatusOr<void*> Activations(const std::string& name, uint64_t count,
                                    float deviation);
  absl::StatusOr<bf16*> Weights(const std::string& name, uint64_t count,
                                float deviation);
  // The same into memory that is there already; `bf16_values`, else float32.
  absl::Status FillNormal(void* data, uint64_t count, bool bf16_values,
                          float deviation);
  absl::Status FillOnes(bf16* data, uint64_t count);
  absl::StatusOr<int32_t*> Integers(const std::string& name,
                                    const std::vector<int32_t>& values);

  // A GPU's warm-up (ops::WarmUpAcceleratorOps) with everything that will be
  // timed; once. Runs nothing on the CPU.
  absl::Status WarmUp(const std::function<absl::Status()>& rehearsal);
  // Seconds of one call of `work`, which enqueues on stream(). `prepare`, if
  // any, runs before each sample, untimed; a sample is at most `max_repeats`
  // calls.
  static constexpr int kMaxRepeats = 1000;
  absl::StatusOr<double> Seconds(
      const std::function<absl::Status()>& work,
      const std::function<absl::Status()>& prepare = {},
      int max_repeats = kMaxRepeats);
  // Of one piece of work that is not repeated.
  absl::StatusOr<double> SecondsOnce(const std::function<absl::Status()>& work);

  // What the ops hold for themselves (a GPU's; final after the warm-up).
  uint64_t workspace_bytes() const;
  // Of the whole GPU; 0 on the CPU.
  absl::StatusOr<uint64_t> memory_bytes();

 private:
  explicit Machine(const MachineOptions& options) : options_(options) {}
  absl::Status Init();
  absl::Status FillPattern(void* data, uint64_t bytes, const void* pattern,
                           uint64_t pattern_bytes);

  const MachineOptions options_;
  std::string name_;
  std::unique_ptr<device::Device> device_;
  std::unique_ptr<ops::Ops> ops_;
  std::vector<device::Buffer> buffers_;
  device::Buffer staging_;  // pinned
  std::unique_ptr<device::Event> begin_, end_;
  std::unique_ptr<device::Stream> stream_;  // ends before the buffers
};

}  // namespace slidedp::bench
