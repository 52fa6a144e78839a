// What a job starts from: the model's files, or a checkpoint's, from rank 0 to
// the daemon.
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "common/model/blank_source.h"
#include "worker/session/session.h"

namespace slidedp::session {

absl::StatusOr<bool> Session::OutputIsThere() {
  const v1::JobSpec& spec = proposal_->spec;
  if (!proposal_->output_may_be_there || spec.output().empty()) return false;
  // It came by one rename; whatever else stands there is an error at the end.
  absl::StatusOr<model::TensorSource> written =
      model::OpenModelFolder(spec.output());
  if (!written.ok() ||
      !model::ValidateSource(proposal_->layout, *written).ok()) {
    return false;
  }
  v1::WorkerMessage message;
  message.mutable_output_committed()->set_path(spec.output());
  Send(message);
  return true;
}

absl::Status Session::PassSource() {
  const std::string& folder = proposal_->spec.model();
  if (proposal_->spec.has_random_weights_seed()) {
    SDP_ASSIGN_OR_RETURN(source_, model::BlankSource(proposal_->layout));
  } else {
    SDP_ASSIGN_OR_RETURN(source_, model::OpenModelFolder(folder));
  }
  SDP_RETURN_IF_ERROR(model::ValidateSource(proposal_->layout, *source_));
  std::vector<std::string> names;
  std::vector<int> fds;
  for (const model::SourceFile& file : source_->files()) {
    names.push_back(file.name);
    fds.push_back(file.fd.get());
  }
  SDP_RETURN_IF_ERROR(
      attachment_->PassFiles(v1::FilesMessage::SOURCE, names, fds));
  if (proposal_->resume.empty()) return absl::OkStatus();
  SDP_ASSIGN_OR_RETURN(resume_, Resume::Find(*proposal_, proposal_->resume));
  return resume_->PassNext(*attachment_);
}

absl::Status Session::AwaitSource() {
  absl::StatusOr<std::vector<std::string>> warnings = attachment_->AwaitFiles();
  while (!warnings.ok() && resume_.has_value()) {
    SDP_RETURN_IF_ERROR(resume_->OnRefused(warnings.status()));
    SDP_RETURN_IF_ERROR(resume_->PassNext(*attachment_));
    warnings = attachment_->AwaitFiles();
  }
  if (!warnings.ok()) {
    return Annotate(warnings.status(),
                    absl::StrCat("load ", proposal_->spec.model()));
  }
  for (const std::string& warning : *warnings) {
    spdlog::warn("job {}: {}", config_.job, warning);
  }
  return resume_.has_value() ? resume_->OnLoaded() : absl::OkStatus();
}

void Session::MakeCheckpoints() {
  if (sweeper_ == nullptr || proposal_->spec.checkpoint().folder().empty()) {
    return;
  }
  auto made = std::make_unique<Checkpoints>(
      config_.job, *proposal_, source_.has_value() ? &*source_ : nullptr,
      *attachment_, *sweeper_,
      [this](const v1::WorkerMessage& message) { Send(message); });
  std::lock_guard<std::mutex> lock(mutex_);
  checkpoints_ = std::move(made);
}

}  // namespace slidedp::session
