#include "worker/session/checkpoints.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "common/model/blank_source.h"

namespace slidedp::session {

Checkpoints::Checkpoints(uint64_t job, const Proposal& proposal,
                         const model::TensorSource* source,
                         Attachment& attachment, Sweeper& sweeper,
                         std::function<void(const v1::WorkerMessage&)> send)
    : job_(job),
      proposal_(proposal),
      source_(source),
      attachment_(attachment),
      sweeper_(sweeper),
      send_(std::move(send)),
      thread_([this] { Run(); }) {}

Checkpoints::~Checkpoints() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

bool Checkpoints::Takes(const v1::DaemonMessage& message) {
  return message.has_open_checkpoint() || message.has_commit_checkpoint() ||
         message.has_drop_checkpoint();
}

void Checkpoints::Post(const v1::DaemonMessage& message) {
  std::lock_guard lock(mutex_);
  messages_.push_back(message);
  changed_.notify_all();
}

void Checkpoints::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !messages_.empty(); });
    if (stopping_) return;
    const v1::DaemonMessage message = std::move(messages_.front());
    messages_.pop_front();
    lock.unlock();
    Handle(message);
    lock.lock();
  }
}

void Checkpoints::Handle(const v1::DaemonMessage& message) {
  if (message.has_open_checkpoint()) {
    Open(message.open_checkpoint().step());
  } else if (message.has_commit_checkpoint()) {
    Commit(message.commit_checkpoint().manifest());
  } else {
    Fail(message.drop_checkpoint().why());
  }
}

void Checkpoints::Open(uint64_t step) {
  const absl::Status status = MakeAndPass(step);
  if (status.ok()) return;
  open_.reset();
  // The daemon answers with DropCheckpoint.
  const absl::Status told = attachment_.PassNone(v1::FilesMessage::CHECKPOINT,
                                                 std::string(status.message()));
  if (!told.ok()) spdlog::debug("job {}: {}", job_, told.ToString());
}

absl::Status Checkpoints::MakeAndPass(uint64_t step) {
  const v1::JobSpec& spec = proposal_.spec;
  const std::string& folder = spec.checkpoint().folder();
  const std::string tag = absl::StrCat("job-", job_);
  std::optional<model::TensorSource> blank;
  if (source_ == nullptr) {
    SDP_ASSIGN_OR_RETURN(blank, model::BlankSource(proposal_.layout));
  }
  SDP_ASSIGN_OR_RETURN(
      const std::vector<checkpoint::File> files,
      checkpoint::MakeFiles(proposal_.layout, blank ? *blank : *source_));
  SDP_ASSIGN_OR_RETURN(
      const std::string hidden,
      checkpoint::NewCheckpoint::HiddenPath(folder, step, tag));
  SDP_RETURN_IF_ERROR(sweeper_.Watch(hidden));
  SDP_ASSIGN_OR_RETURN(open_, checkpoint::NewCheckpoint::Create(
                                  folder, step, spec.model(), files, tag));
  std::vector<std::string> names;
  std::vector<int> fds;
  for (size_t i = 0; i < files.size(); ++i) {
    names.push_back(files[i].name);
    fds.push_back(open_->fds()[i].get());
  }
  return attachment_.PassFiles(v1::FilesMessage::CHECKPOINT, names, fds);
}

void Checkpoints::Commit(const std::string& manifest) {
  if (open_ == nullptr) return Fail("no checkpoint is open");
  auto commit = [&]() -> absl::Status {
    SDP_ASSIGN_OR_RETURN(
        checkpoint::Manifest parsed,
        checkpoint::ParseManifest(manifest, "the daemon's manifest"));
    return open_->Commit(std::move(parsed));
  };
  if (absl::Status status = commit(); !status.ok()) {
    return Fail(std::string(status.message()));
  }
  v1::WorkerMessage message;
  v1::CheckpointCommitted& committed = *message.mutable_checkpoint_committed();
  committed.set_path(open_->path());
  open_.reset();
  if (absl::Status status = sweeper_.Forget(); !status.ok()) {
    spdlog::warn("job {}: {}", job_, std::string(status.message()));
  }
  const v1::Checkpoint& settings = proposal_.spec.checkpoint();
  if (absl::Status status =
          checkpoint::Prune(settings.folder(), settings.keep());
      !status.ok()) {
    committed.set_warning(
        absl::StrCat("older ones are not removed: ", status.message()));
  }
  spdlog::info("job {}: checkpoint {}", job_, committed.path());
  send_(message);
}

void Checkpoints::Fail(const std::string& why) {
  open_.reset();  // removes it
  spdlog::warn("job {}: the checkpoint failed: {}", job_, why);
  v1::WorkerMessage message;
  message.mutable_checkpoint_failed()->set_why(why);
  send_(message);
}

}  // namespace slidedp::session
