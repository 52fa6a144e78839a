// Where a run begins, and how it is saved.
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "hostd/checkpoint/reader.h"
#include "hostd/daemon/job_run.h"
#include "hostd/daemon/step_records.h"
#include "hostd/store/random_weights.h"
#include "proto/identity.h"

namespace slidedp::hostd {

void JobRun::MakeCheckpoints() {
  if (job_.spec.checkpoint().folder().empty()) return;
  RunCheckpoints::Events events;
  events.post = [this](std::function<void()> task) {
    Back([task = std::move(task)](JobRun&) { task(); });
  };
  events.send = [this](const v1::DaemonMessage& message) {
    if (ranks_[0].session != nullptr) ranks_[0].session->Send(message);
  };
  events.begun = [this] { events_.checkpointing(); };
  events.sync_records = [id = job_.id, folder = config_.log_folder(job_.id)] {
    if (absl::Status status = StepRecords::Sync(folder); !status.ok()) {
      spdlog::warn("job {}: {}", id, std::string(status.message()));
    }
  };
  events.memory = [this](uint64_t step) { return memory_.After(step); };
  events.ended = [this](const CheckpointEnd& end) {
    events_.checkpointed(end);
  };
  events.last_ended = [this] {
    if (!put_back_.has_value()) return;
    const auto [why, reason] = *put_back_;
    Abort(v1::PENDING, why, reason);
  };
  checkpoints_ = std::make_unique<RunCheckpoints>(job_.spec, std::move(events));
}

void JobRun::LoadSource() {
  // `state` is used by this task only until it comes back: a tear-down queues
  // behind it.
  if (job_.spec.has_random_weights_seed() && job_.spec.output().empty() &&
      job_.resume.empty()) {
    thread_.Post([this, state = state_.get()] {
      const absl::Status status = FillRandom(*state);
      Back([status](JobRun& run) { run.OnLoaded(status); });
    });
    return;
  }
  thread_.Post([this, state = state_.get(), connection = files_connection_] {
    auto load = [&]() -> absl::Status {
      SDP_ASSIGN_OR_RETURN(
          NamedFiles files,
          ReceiveFiles(connection->socket.get(), v1::FilesMessage::SOURCE));
      SDP_ASSIGN_OR_RETURN(source_,
                           model::TensorSource::FromFiles(std::move(files)));
      SDP_RETURN_IF_ERROR(model::ValidateSource(state->layout(), *source_));
      if (!job_.resume.empty()) {
        SDP_ASSIGN_OR_RETURN(const auto manifest,
                             Resume(connection->socket.get(), *state));
        if (manifest.has_value()) {
          Back(
              [manifest = *manifest](JobRun& run) { run.OnResumed(manifest); });
          return absl::OkStatus();
        }
      }
      return job_.spec.has_random_weights_seed()
                 ? FillRandom(*state)
                 : LoadParameters(*source_, *state, &stop_files_,
                                  &load_progress_);
    };
    absl::Status status = load();
    if (absl::Status sent =
            SendFilesReply(connection->socket.get(), status, {});
        status.ok()) {
      status = sent;
    }
    Back([status](JobRun& run) { run.OnLoaded(status); });
  });
}

absl::Status JobRun::FillRandom(HostState& state) const {
  // Nothing else computes yet: every CPU may help.
  return FillRandomParameters(job_.spec.random_weights_seed(),
                              job_.checked.problem.logical_cpus, state,
                              &stop_files_);
}

void JobRun::OnLoaded(const absl::Status& status) {
  if (phase_ != Phase::kLoading) return;
  if (!status.ok()) {
    return OnFilesFailed(absl::StrCat("loading ", job_.spec.model()), status);
  }
  loaded_ = true;
  if (const uint64_t all_bytes = load_progress_.all_bytes; all_bytes > 0) {
    events_.moved(all_bytes, all_bytes);
  }
  StartStepsIfReady();
}

void JobRun::OnFilesFailed(const std::string& doing,
                           const absl::Status& status) {
  // A connection that broke is the rank's death; its exit tells more.
  if (absl::IsCancelled(status) || absl::IsUnavailable(status)) {
    return FailRank(0, "closed its attach connection", /*refinable=*/true);
  }
  Abort(v1::FAILED, shm::AbortReason::kJobFailed,
        absl::StrCat(doing, ": ", status.message()));
}

absl::StatusOr<std::optional<checkpoint::Manifest>> JobRun::Resume(
    int socket, HostState& state) {
  absl::Status last;
  while (true) {
    SDP_ASSIGN_OR_RETURN(NamedFiles files,
                         ReceiveFiles(socket, v1::FilesMessage::RESUME,
                                      /*may_be_empty=*/true));
    if (files.empty()) {
      if (!last.ok()) return last;
      return std::optional<checkpoint::Manifest>();
    }
    absl::StatusOr<checkpoint::Manifest> manifest = LoadCheckpoint(
        std::move(files), {SamplerIdentity(job_.spec), job_.spec.steps()},
        state, &stop_files_, &load_progress_);
    if (manifest.ok()) return std::optional(*std::move(manifest));
    last = manifest.status();
    SDP_RETURN_IF_ERROR(SendFilesReply(socket, last, {}));
  }
}

void JobRun::OnResumed(const checkpoint::Manifest& manifest) {
  begin_ = {manifest.step, manifest.updates, manifest.clip_history};
  begin_memory_ = manifest.memory;
  std::string event =
      absl::StrCat("goes on from a checkpoint after step ", manifest.step);
  for (const std::string& difference : checkpoint::Differences(
           manifest.training, TrainingIdentity(job_.spec))) {
    absl::StrAppend(&event, "; ", difference);
  }
  Say(state_word_, "loading weights and data", event);
}

absl::Status JobRun::RequestCheckpoint() {
  if (checkpoints_ == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", job_.id,
                     " has no folder for checkpoints; set "
                     "checkpoint.folder in the job file"));
  }
  if (phase_ != Phase::kStepping || steps_applied_ == last_step()) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", job_.id,
                     phase_ < Phase::kStepping
                         ? " has not begun to train; try again when it has"
                         : " has no step left to save"));
  }
  checkpoints_->Request();
  return absl::OkStatus();
}

void JobRun::PutBack(shm::AbortReason why, const std::string& reason) {
  if (!CanCancel() || put_back_.has_value()) return;
  if (checkpoints_ != nullptr && phase_ == Phase::kStepping) {
    put_back_ = {why, reason};
    Say(state_word_, "saving, then going back to the queue");
    checkpoints_->RequestLast();
    return;
  }
  Abort(v1::PENDING, why, reason);
}

}  // namespace slidedp::hostd
