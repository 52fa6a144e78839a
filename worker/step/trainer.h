// The sliding schedule of one rank (architecture section 5), written once
// against Device, Ops and Collective.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "common/collective/collective.h"
#include "common/device/device.h"
#include "common/model/layout.h"
#include "common/shm/segment.h"
#include "policy/plan.h"
#include "worker/data/dataset.h"
#include "worker/ops/ops.h"

namespace slidedp::step {

// Everything is borrowed and outlives the Trainer.
struct TrainerInputs {
  device::Device* device;
  ops::Ops* ops;
  // Null with one rank.
  collective::Collective* param_collective;
  collective::Collective* grad_collective;
  const model::ModelConfig* config;
  const model::StateLayout* layout;
  const policy::Plan* plan;
  int rank;
  const data::Dataset* dataset;
  uint64_t seed;
  data::BatchShape batch;
  // The job's segments, mapped.
  const shm::Mapping* params;
  const shm::Mapping* grads;
  const shm::Mapping* versions;
  const shm::Mapping* reports;
};

// Looks into a step, for tests and goldens. Called on a stream thread of the
// CPU device; a CUDA trainer refuses hooks.
struct Hooks {
  // The unit's float32 gradient of this rank, before reduction.
  std::function<void(int unit, const float* gradient, uint64_t count)>
      on_gradient;
  // Logits of `rows` tokens of micro-batch `micro_batch`, from `first_row`.
  std::function<void(int64_t micro_batch, int64_t first_row, int64_t rows,
                     const float* logits)>
      on_logits;
};

class Trainer {
 public:
  // Allocates every device buffer of the plan (policy::DeviceBuffers, to the
  // byte) and registers the segments.
  static absl::StatusOr<std::unique_ptr<Trainer>> Create(
      const TrainerInputs& inputs, Hooks hooks = {});
  virtual ~Trainer() = default;

  // Enqueues steps [first, first + count) and returns when all of their
  // gradients are in `grads` and their reports are complete. Blocks for
  // parameter versions through the streams.
  virtual absl::Status Run(uint64_t first, uint64_t count) = 0;
  // Steps whose work is all enqueued; for heartbeats.
  virtual uint64_t steps_enqueued() const = 0;
  virtual uint64_t device_bytes() const = 0;
};

}  // namespace slidedp::step
