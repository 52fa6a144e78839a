// What a step's losses and norms are, and what follows from them: which buckets
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

// What may be done with a bucket's complete pieces.
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
  // Buckets are to be updated before c is known.
  void Speculate() { speculating_ = true; }

  // True if the losses came with this call. Eager mode: an error if one is not
  // finite; `has_tokens`: it matters.
  absl::StatusOr<bool> ReadLosses(bool has_tokens);
  // All draining ranks have begun to drain the bucket. Eager mode: an error if
  // any rank's norm is not finite.
  absl::Status Read(int bucket);
  // With the losses known: opens or closes the buckets whose turn has come.
  // Speculation goes from the first bucket to the last, whatever the order of
  // arrival, so that bits don't depend on it.
  void OpenBuckets();

  Gate gate(int bucket) const { return gates_[bucket]; }
  bool has_losses() const { return loss_sums_.has_value(); }
  // Not in eager mode: every bucket is open or waits for the decision.
  bool all_known() const { return next_ == gates_.size(); }
  bool speculated() const { return speculated_; }
  double loss_sum() const;

  // The rest is for the step's end.

  // sqrt of all buckets' squared norms, in their order.
  double TotalNorm() const;
  double ClipCoefficient(double total_norm) const;
  // Not eager: why the step can't be applied; empty if it can.
  std::string SkipReason(double total_norm) const;

 private:
  // Nothing while it isn't known. A rank that calls its part not finite is
  // believed, whatever the sum.
  std::optional<double> SquareNorm(size_t bucket) const;

  const model::StateLayout& layout_;
  const StepWork& work_;
  const RankReports& reports_;
  const UpdateWorkers& workers_;
  const bool eager_;
  const double max_grad_norm_;

  uint64_t step_ = 0;
  std::optional<std::vector<double>> loss_sums_;  // per rank
  // Per bucket: of the draining ranks together; not finite if any rank's isn't.
  std::vector<std::optional<double>> reported_;
  std::vector<int> bad_rank_;  // whose it isn't; -1: none's
  std::vector<Gate> gates_;    // per bucket
  bool speculating_ = false, speculated_ = false;
  size_t next_ = 0;            // whose norm comes next into the sum
  double sum_of_squares_ = 0;  // of the buckets before it
};

}  // namespace slidedp::hostd
