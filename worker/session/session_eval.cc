// Held-out data, its evaluation together with the other ranks, and the scalars
// for TensorBoard.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "worker/data/job_data.h"
#include "worker/session/session.h"

namespace slidedp::session {

absl::Status Session::OpenEvalDataset() {
  const v1::JobSpec& spec = proposal_->spec;
  if (!spec.has_eval()) return absl::OkStatus();
  const v1::Evaluation& eval = spec.eval();
  SDP_ASSIGN_OR_RETURN(eval_dataset_,
                       data::OpenHeldOut(spec, proposal_->config.vocab));
  SDP_RETURN_IF_ERROR(data::CheckUnchanged(
      *eval_dataset_, {eval.dataset_sequences(), eval.dataset_tokens(),
                       eval.dataset_crc32c()}));
  if (eval.max_sequences() >= 1 &&
      eval.max_sequences() <= eval_dataset_->sequences()) {
    return absl::OkStatus();
  }
  return InvalidInput(eval.data(), "max_sequences",
                      absl::StrCat(eval.max_sequences()),
                      absl::StrCat("the file has ", eval_dataset_->sequences()),
                      "let slidedpctl submit the job");
}

step::EvaluationInputs Session::EvaluationInputs() {
  step::EvaluationInputs inputs;
  if (!eval_dataset_.has_value()) return inputs;
  const v1::Evaluation& eval = proposal_->spec.eval();
  inputs.dataset = &*eval_dataset_;
  inputs.sequences = eval.max_sequences();
  inputs.every_steps = eval.every_steps();
  inputs.on_part = [this](const step::EvaluationPart& part) {
    return ReportEvaluation(part);
  };
  return inputs;
}

absl::StatusOr<bool> Session::ReportEvaluation(
    const step::EvaluationPart& part) {
  v1::WorkerMessage message;
  v1::EvalReport& report = *message.mutable_eval_report();
  report.set_step(part.step);
  report.set_loss_sum(part.loss_sum);
  report.set_valid_tokens(part.valid_tokens);
  report.set_seconds(part.seconds);
  Send(message);
  // Other messages wait for their turn. If the daemon goes, so do we.
  const auto is_verdict = [](const v1::DaemonMessage& m) {
    return m.has_eval_verdict();
  };
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] {
    return std::any_of(messages_.begin(), messages_.end(), is_verdict);
  });
  const auto found =
      std::find_if(messages_.begin(), messages_.end(), is_verdict);
  const v1::EvalVerdict verdict = found->eval_verdict();
  messages_.erase(found);
  lock.unlock();
  if (verdict.step() != part.step) {
    return absl::InternalError(
        absl::StrCat("the daemon answers the evaluation after step ", part.step,
                     " with one after step ", verdict.step(),
                     "; slidedpd and slidedp-worker must be of one release"));
  }
  if (verdict.stop()) {
    spdlog::info("job {}: ends early, after step {}", config_.job, part.step);
  }
  return !verdict.stop();
}

absl::Status Session::OpenScalarLog() {
  const std::string& folder = proposal_->spec.tensorboard();
  if (config_.rank != 0 || folder.empty()) return absl::OkStatus();
  SDP_ASSIGN_OR_RETURN(std::unique_ptr<ScalarLog> log,
                       ScalarLog::Open(folder, config_.job));
  std::lock_guard<std::mutex> lock(mutex_);
  scalar_log_ = std::move(log);
  return absl::OkStatus();
}

}  // namespace slidedp::session
