// Evaluations of a run: the ranks' parts together, and what follows.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "hostd/daemon/job_run.h"
#include "policy/eval_schedule.h"

namespace slidedp::hostd {

void JobRun::OnEvalReport(uint32_t rank, const v1::EvalReport& report) {
  if (phase_ != Phase::kStepping || !job_.spec.has_eval() || stop_step_) {
    return Unexpected(rank, "eval_report");
  }
  const bool due = policy::EvaluationIsDue(report.step(), job_.spec.steps(),
                                           job_.spec.eval().every_steps());
  const bool first =
      std::none_of(ranks_.begin(), ranks_.end(),
                   [](const Rank& r) { return r.eval.has_value(); });
  // Ranks go on together: all of them are at the same evaluation, after the
  // last one.
  if (!due || report.step() > job_.spec.steps() || ranks_[rank].eval ||
      report.step() < next_eval_step_ ||
      (!first && report.step() != eval_step_)) {
    FailRank(rank,
             absl::StrCat("reports the evaluation after step ", report.step(),
                          ", which is not its turn"),
             /*refinable=*/false);
    return;
  }
  eval_step_ = report.step();
  ranks_[rank].eval = report;
  FinishEvaluation();
}

// Once every rank's part is there, and the record of the step before is out.
void JobRun::FinishEvaluation() {
  if (!job_.spec.has_eval()) return;
  const bool all =
      std::all_of(ranks_.begin(), ranks_.end(),
                  [](const Rank& rank) { return rank.eval.has_value(); });
  if (!all || steps_applied_ < eval_step_ || phase_ != Phase::kStepping) return;
  double loss_sum = 0;
  v1::EvalRecord record;
  for (Rank& rank : ranks_) {
    loss_sum += rank.eval->loss_sum();
    record.set_valid_tokens(record.valid_tokens() + rank.eval->valid_tokens());
    record.set_seconds(std::max(record.seconds(), rank.eval->seconds()));
    rank.eval.reset();
  }
  const v1::Evaluation& eval = job_.spec.eval();
  if (record.valid_tokens() != eval.dataset_valid_tokens()) {
    Abort(v1::FAILED, shm::AbortReason::kJobFailed,
          absl::StrCat("the ranks evaluated ", record.valid_tokens(),
                       " labels of ", eval.data(), ", there were ",
                       eval.dataset_valid_tokens(),
                       " at submission: the file has changed"));
    return;
  }
  record.set_step(eval_step_);
  record.set_sequences(eval.max_sequences());
  record.set_loss(loss_sum / static_cast<double>(record.valid_tokens()));
  record.set_best(memory_.AddEvaluation(eval_step_, record.loss()));
  next_eval_step_ = eval_step_ + 1;
  if (measures_) measures_->Interrupted();
  v1::Record told;
  *told.mutable_eval() = record;
  Tell(told);
  const bool stop =
      memory_.evaluations().should_stop() && eval_step_ < job_.spec.steps();
  if (stop) StopEarly();
  v1::DaemonMessage message;
  message.mutable_eval_verdict()->set_step(eval_step_);
  message.mutable_eval_verdict()->set_stop(stop);
  SendAll(message);
}

void JobRun::StopEarly() {
  stop_step_ = eval_step_;
  const EarlyStop& evaluations = memory_.evaluations();
  stop_reason_ = absl::StrFormat(
      "stopped early after step %d of %d: %d evaluations in a row were not "
      "lower by %g; the lowest loss was %.6g, after step %d",
      eval_step_, job_.spec.steps(), evaluations.since_better(),
      job_.spec.early_stop().min_delta(), evaluations.best_loss().value_or(0),
      evaluations.best_step());
  Say(state_word_, "", stop_reason_);
}

}  // namespace slidedp::hostd
