// What a step's losses and norms are, and what follows from them: which units
// may be updated before the step is decided, the clip coefficient, a reason to
// skip. The coordinator's alone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "hostd/update/rank_reports.h"
#include "hostd/update/step_work.h"
#include "hostd/update/workers.h"

namespace slidedp::hostd {

// What may be done with a unit's complete pieces.
enum class Gate { kClosed, kOpen, kAfterDecision };

class StepNorms {
 public:
  // All are borrowed. `max_grad_norm` 0: no clipping.
  StepNorms(const model::StateLayout& layout, const StepWork& work,
            const RankReports& reports, const UpdateWorkers& workers,
            bool eager, double max_grad_norm)
      : layout_(layout),
        work_(work),
        reports_(reports),
        workers_(workers),
        eager_(eager),
        max_grad_norm_(max_grad_norm) {}

  void BeginStep(uint64_t step);
  // Units are to be updated before c is known.
  void Speculate() { speculating_ = true; }

  // True if the losses came with this call. Eager mode: an error if one is not
  // finite; `has_tokens`: it matters.
  absl::StatusOr<bool> ReadLosses(bool has_tokens);
  // All draining ranks have begun to drain the unit. Eager mode: an error if
  // any rank's norm is not finite.
  absl::Status ReadUnit(int unit);
  // With the losses known: opens or closes the units whose turn has come.
  // Speculation goes from the last unit to the first, whatever the order of
  // arrival, so that bits don't depend on it.
  void OpenUnits();

  Gate gate(int unit) const { return gates_[unit]; }
  bool has_losses() const { return loss_sums_.has_value(); }
  // Not in eager mode: every unit is open or waits for the decision.
  bool all_known() const { return next_unit_ < 0; }
  bool speculated() const { return speculated_; }
  double loss_sum() const;

  // The rest is for the step's end.

  // sqrt of all units' squared norms, in unit order.
  double TotalNorm() const;
  double ClipCoefficient(double total_norm) const;
  // Not eager: why the step can't be applied; empty if it can.
  std::string SkipReason(double total_norm) const;

 private:
  // Nothing while it isn't known. A rank that calls its part not finite is
  // believed, whatever the sum.
  std::optional<double> SquareNorm(int unit) const;

  const model::StateLayout& layout_;
  const StepWork& work_;
  const RankReports& reports_;
  const UpdateWorkers& workers_;
  const bool eager_;
  const double max_grad_norm_;

  uint64_t step_ = 0;
  std::optional<std::vector<double>> loss_sums_;  // per rank
  // Per unit: of the draining ranks together; not finite if any rank's isn't.
  std::vector<std::optional<double>> reported_;
  std::vector<int> bad_rank_;  // whose it isn't; -1: none's
  std::vector<Gate> gates_;    // per unit
  bool speculating_ = false, speculated_ = false;
  int next_unit_ = 0;          // whose norm comes next into the sum
  double sum_of_squares_ = 0;  // of the units after it
};

}  // namespace slidedp::hostd
