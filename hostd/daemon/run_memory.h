// What a run remembers of its steps and evaluations, and goes by: which losses
// stand out, how many steps in a row were skipped, whether evaluations still
// get better. It goes with checkpoints, so that a job that goes on from one
// decides as if it had never stopped.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <utility>

#include "common/checkpoint/manifest.h"
#include "hostd/daemon/early_stop.h"
#include "hostd/daemon/loss_watch.h"
#include "hostd/update/engine.h"
#include "proto/job.pb.h"

namespace slidedp::hostd {

class RunMemory {
 public:
  explicit RunMemory(const v1::JobSpec& spec);

  // Steps and evaluations in v1::Record's order. A step's loss may stand out.
  std::optional<LossWatch::Spike> AddStep(const StepResult& result);
  // True: the lowest so far.
  bool AddEvaluation(uint64_t step, double loss);

  const EarlyStop& evaluations() const { return early_stop_; }
  uint64_t skipped_in_a_row() const { return skipped_in_a_row_; }

  // As it was after the first `step` steps, before an evaluation that follows
  // them; `step` is one of the last few. Nothing if that step is not told yet.
  std::optional<checkpoint::Memory> After(uint64_t step) const;
  // The run begins after `step` steps. Evaluations of other held-out sequences
  // are forgotten; false if there were any.
  bool Begin(uint64_t step, const checkpoint::Memory& memory);

 private:
  // Checkpoints end before the step after next does.
  static constexpr size_t kPasts = 8;
  // In v1::Record's order.
  void Remember(uint64_t place);

  const checkpoint::Identity held_out_;
  LossWatch losses_;
  uint64_t skipped_in_a_row_ = 0;
  EarlyStop early_stop_;
  std::deque<std::pair<uint64_t, checkpoint::Memory>> pasts_;  // by place
};

}  // namespace slidedp::hostd
