// Applies the ranks' gradients to a job's planes, chunk by chunk, in the mode
// of its plan, and publishes versions (architecture section 5). One per running
// job. Reads `grads` and `reports`, writes the planes and `versions`.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "common/trace/trace.h"
#include "hostd/store/host_state.h"
#include "hostd/update/step_work.h"
#include "policy/lr_schedule.h"

namespace slidedp::hostd {

inline constexpr int kPredictorSteps = 8;

struct UpdateConfig {
  double lr, beta1, beta2, eps, weight_decay;
  policy::LrSchedule schedule;  // total_steps: the job's steps
  double max_grad_norm = 0;     // not eager; 0: no clipping
  int threads = 1;
  // A job that goes on: steps before its first, and how many of them were
  // applied (Boundary).
  uint64_t first_step = 0, updates_applied = 0;
  // Speculative mode: which of the last steps were clipped or skipped, bit 0
  // the latest (StepResult::clip_history): a job that goes on must go on with
  // it, as it decides how the next steps are applied, and so their rounding.
  uint64_t clip_history = 0;
  // As many of the last kPredictorSteps, or more, make the next step deferred.
  int clipped_to_defer = 4;
  uint64_t slice_elements = kSliceElements;  // see step_work.h
  // Gets a span for each task of the workers (a piece's sum, update...), before
  // what it did is published. Borrowed; may be null.
  trace::Recorder* recorder = nullptr;
};

// One finished step (all units at version step + 1).
struct StepResult {
  uint64_t step;  // 0-based
  double loss;    // sum over ranks / valid tokens; NaN if there are none
  // Before clipping; not finite if that is why the step was skipped, 0 if it
  // had no tokens.
  double grad_norm;
  double clip_coefficient, lr;
  uint64_t valid_tokens;
  bool speculated;        // units were updated before c was known
  uint64_t clip_history;  // UpdateConfig's, after this step
  bool skipped;
  std::string skip_reason;
  // Skipped for a loss or gradient that is not finite, not for want of tokens.
  bool not_finite;
  int64_t begin_ns, end_ns;  // first rank's begin, last publication
  // Maximum of the ranks; 0 for ranks whose times came later than the next
  // step's last update.
  int64_t deliver_ns, compute_ns, reduce_ns, drain_ns, stall_ns;
  int64_t offload_ns, offload_wait_ns;
  int64_t update_ns;  // busiest worker
};

// The planes between two steps: every unit is at version `step`.
struct Boundary {
  uint64_t step;
  // What a job needs to go on from here, beside the planes (UpdateConfig).
  uint64_t updates_applied, clip_history;
};

class UpdateEngine {
 public:
  // Called on an engine thread, in step order; it must not call Stop(), and
  // polling waits for it.
  using OnStep = std::function<void(const StepResult&)>;
  // Called once, on an engine thread: eager mode met a non-finite unit (named,
  // before its planes were touched), a report made no sense, an update left
  // the finite range. Nothing is applied afterwards.
  using OnFailure = std::function<void(const absl::Status&)>;
  // Called on an engine thread after each step, before OnStep of that step.
  // True: no unit changes before Release(unit); ranks and sums go on.
  using OnBoundary = std::function<bool(const Boundary&)>;

  // `state` outlives the engine. Starts its threads.
  static std::unique_ptr<UpdateEngine> Start(HostState& state,
                                             const UpdateConfig& config,
                                             OnStep on_step,
                                             OnFailure on_failure,
                                             OnBoundary on_boundary = {});
  virtual ~UpdateEngine() = default;  // Stop()
  // Finishes the chunks being applied, then ends the threads. The planes then
  // no longer change. No callback runs after it returns; results of finished
  // steps are still handed out before. Thread-safe.
  virtual void Stop() = 0;
  virtual uint64_t steps_done() const = 0;
  // The unit may change again. From any thread, before Stop() is called.
  virtual void Release(int unit) = 0;
};

}  // namespace slidedp::hostd
