// What a run makes of a step's result: its record, and whether training still
// makes sense.

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/log.h"
#include "common/model/shapes.h"
#include "hostd/daemon/job_run.h"
#include "policy/peak_rates.h"

namespace slidedp::hostd {
namespace {

// Of a job's history: more say nothing new.
constexpr int kMostNotices = 100;

}  // namespace

StepMeasures::Job JobRun::MeasuredJob() const {
  const auto length = static_cast<double>(job_.spec.sequence_length());
  StepMeasures::Job job;
  job.tokens = job_.spec.batch_size() * job_.spec.sequence_length();
  // The formula counts every weight's gradient.
  if (job_.checked.layout.frozen_parameters == 0) {
    job.flops = model::ModelFlops(job_.checked.config,
                                  static_cast<double>(job.tokens), length)
                    .total();
  }
  if (plan_.float32) return job;
  for (const Rank& rank : ranks_) {
    const double peak =
        policy::PeakBf16FlopsPerSecond(rank.hello.device_description());
    if (peak == 0) {
      job.peak_flops_per_second = 0;
      break;
    }
    job.peak_flops_per_second += peak;
  }
  return job;
}

void JobRun::Notice(const std::string& text) {
  spdlog::warn("job {}: {}", job_.id, text);
  if (++notices_ > kMostNotices) return;
  Say(state_word_, "",
      notices_ < kMostNotices
          ? text
          : absl::StrCat(text, "; further ones are in the log only"));
}

void JobRun::Tell(v1::Record& record) {
  events_.record(record);
  if (job_.spec.tensorboard().empty() || ranks_[0].session == nullptr) return;
  v1::DaemonMessage message;
  *message.mutable_record() = record;
  ranks_[0].session->Send(message);
}

void JobRun::OnStep(const StepResult& result) {
  // A step that was applied before an abort is still reported.
  steps_applied_ = result.step + 1;
  v1::Record told;
  v1::StepRecord& record = *told.mutable_step();
  record = measures_->Next(result);
  const std::optional<LossWatch::Spike> spike = memory_.AddStep(result);
  record.set_loss_spike(spike.has_value());
  Tell(told);
  if (auto trace = trace_.lock()) {
    trace->OnStep(result.step, result.begin_ns, result.end_ns, update_spans_);
  }
  if (checkpoints_ != nullptr) checkpoints_->OnRecord();
  if (phase_ != Phase::kStepping) return;
  if (spike.has_value()) {
    Notice(absl::StrFormat(
        "step %d: the loss, %.4g, stands out: the mean of the losses before is "
        "%.4g, their deviation %.2g",
        record.step(), result.loss, spike->mean, spike->deviation));
  }
  if (!MayGoOn(result)) return;
  FinishEvaluation();
  CompleteIfDone();
}

bool JobRun::MayGoOn(const StepResult& result) {
  if (!result.not_finite) return true;
  const uint64_t limit = job_.spec.max_skipped_steps();
  const std::string what = absl::StrCat("step ", result.step + 1,
                                        " was skipped: ", result.skip_reason);
  if (memory_.skipped_in_a_row() <= limit || limit == 0) {
    Notice(what);
    return true;
  }
  Abort(v1::FAILED, shm::AbortReason::kJobFailed,
        absl::StrCat(what, "; with it ", memory_.skipped_in_a_row(),
                     " steps in a row, max_skipped_steps is ", limit,
                     ": lower the learning rate, or look at the data"));
  return false;
}

}  // namespace slidedp::hostd
