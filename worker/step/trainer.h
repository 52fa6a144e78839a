// The sliding schedule of one rank (architecture section 5), written once
// against Device, Ops and Collective.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/bf16.h"
#include "common/collective/collective.h"
#include "common/device/device.h"
#include "common/model/layout.h"
#include "common/shm/segment.h"
#include "common/trace/trace.h"
#include "policy/plan.h"
#include "worker/data/mixture.h"
#include "worker/data/step_batch.h"
#include "worker/ops/ops.h"

namespace slidedp::step {

// This rank's part of an evaluation after `step` steps.
struct EvaluationPart {
  uint64_t step = 0;
  double loss_sum = 0;        // of token losses
  uint64_t valid_tokens = 0;  // this rank's
  double seconds = 0;
};

struct EvaluationInputs {
  const data::Dataset* dataset = nullptr;  // null: there are none
  uint64_t sequences = 0;                  // the first so many
  uint64_t every_steps = 0;                // policy::EvaluationIsDue
  // Called on the thread of Run with each part; returns when all ranks may go
  // on. False: no further step is made.
  std::function<absl::StatusOr<bool>(const EvaluationPart&)> on_part;
};

// Everything is borrowed and outlives the Trainer.
struct TrainerInputs {
  device::Device* device = nullptr;
  ops::Ops* ops = nullptr;
  // Null with one rank.
  collective::Collective* param_collective = nullptr;
  collective::Collective* grad_collective = nullptr;
  const model::ModelConfig* config = nullptr;
  const model::StateLayout* layout = nullptr;
  const policy::Plan* plan = nullptr;
  int rank = 0;
  const data::Mixture* mixture = nullptr;
  data::BatchShape batch;
  EvaluationInputs eval;
  // The job's segments, mapped.
  const shm::Mapping* params = nullptr;
  const shm::Mapping* grads = nullptr;
  const shm::Mapping* versions = nullptr;
  const shm::Mapping* reports = nullptr;
  // Gets the lanes' spans of every step when it is over (LaneTimes). May be
  // null.
  trace::Recorder* recorder = nullptr;

  // A GPU's ops::WarmUpAcceleratorOps, bound to `ops`; empty on the CPU. Create
  // calls it once, with everything allocated and no word waited for: the
  // rehearsal runs every operation, copy and collective of a step on the very
  // buffers that steps use, and reports nothing. All ranks of a job must have
  // it, or none: its collectives meet.
  std::function<absl::Status(const std::function<absl::Status()>& rehearsal)>
      warm_up;
  // Device memory that the ops hold beside the plan's buffers; asked after the
  // warm-up. Empty: none.
  std::function<uint64_t()> ops_workspace_bytes;

  // Computes and nothing else, for benchmarks: every unit stays on the device,
  // gradients stay in their accumulators, no word is waited for or written.
  // Needs one rank and a window slot for every layer. `params` etc. are not
  // used and may be null. Without data, tokens are pseudo-random (from `seed`),
  // and every one is a label.
  bool compute_only = false;
  uint64_t seed = 0;
  // compute_only: called by Create for each unit, before the warm-up, to write
  // its elements (StateLayout) to `weights`, device memory, which is zero
  // before; done when it returns.
  std::function<absl::Status(int unit, bf16* weights)> fill_weights;
};

// A step on the compute stream.
struct ComputeTimes {
  int64_t busy_ns;   // sum over visits of units
  int64_t stall_ns;  // between visits
  int64_t end_ns;    // MonotonicNs of its end
};

// Looks into a step, for tests and goldens. on_gradient and on_logits are
// called as Observer says: on a stream thread of the CPU device, else by the
// thread that calls Run, which then waits for the device.
struct Hooks {
  // May replace the step's tokens and labels by as many others.
  std::function<void(uint64_t step, data::StepBatch& batch)> on_batch;
  // The unit's float32 gradient of this rank, before reduction. What is frozen
  // may hold anything.
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
  // parameter versions through the streams. Evaluates before the first, in
  // between, and after the last; ends before a step if on_part says so.
  virtual absl::Status Run(uint64_t first, uint64_t count) = 0;
  // Steps whose work is all enqueued; for heartbeats.
  virtual uint64_t steps_enqueued() const = 0;
  // The plan's buffers, those in pinned host memory apart, and the ops'
  // workspace.
  virtual uint64_t device_bytes() const = 0;

  // compute_only: the steps of all Runs so far, in order.
  virtual const std::vector<ComputeTimes>& compute_times() const = 0;
};

}  // namespace slidedp::step
