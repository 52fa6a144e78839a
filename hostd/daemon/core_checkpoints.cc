// Checkpoints of jobs, and how a job ends or goes on.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "hostd/daemon/core.h"
#include "hostd/daemon/job_state.h"
#include "hostd/daemon/log_lines.h"

namespace slidedp::hostd {

absl::StatusOr<v1::CheckpointReply> Core::Checkpoint(
    const Identity& identity, const v1::CheckpointRequest& request) {
  SDP_ASSIGN_OR_RETURN(Job * job,
                       Reach(identity, Verb::kCheckpoint, request.id()));
  if (job->run == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job ", request.id(), " is ", v1::JobState_Name(job->row.state),
        "; only a running job can be saved"));
  }
  SDP_RETURN_IF_ERROR(job->run->RequestCheckpoint());
  const v1::JobProgress& progress = job->row.progress;
  v1::CheckpointReply reply;
  // One that is under way holds an earlier step.
  reply.set_ended(progress.checkpoints_ended() +
                  (progress.checkpointing() ? 2 : 1));
  return reply;
}

bool Core::TakeRetry(Job& job) {
  v1::JobProgress& progress = job.row.progress;
  if (progress.retries_used() >= job.row.spec.retries()) return false;
  progress.set_retries_used(progress.retries_used() + 1);
  return true;
}

void Core::AddCheckpointEvents(Job& job, RunEvents& events) {
  Job* const it = &job;
  events.begun = [it](uint64_t first_step, const EarlyStop& evaluations) {
    // What was reported beyond it was of another attempt.
    if (absl::Status status = it->records.Truncate(first_step); !status.ok()) {
      spdlog::error("job {}: {}", it->row.id, std::string(status.message()));
    }
    it->row.step = first_step;
    it->row.progress.set_first_step(first_step);
    it->last_eval.reset();
    it->best_eval.reset();
    if (!evaluations.best_loss().has_value()) return;
    it->best_eval.emplace().set_loss(*evaluations.best_loss());
    it->best_eval->set_step(evaluations.best_step());
  };
  events.checkpointing = [this, it] {
    it->row.progress.set_checkpointing(true);
    it->loaded_bytes = it->load_bytes = 0;
    Changed(*it);
  };
  events.checkpointed = [this, it](const CheckpointEnd& end) {
    v1::JobProgress& progress = it->row.progress;
    progress.set_checkpointing(false);
    progress.set_checkpoints_ended(progress.checkpoints_ended() + 1);
    std::string text;
    if (end.failure.empty()) {
      progress.set_checkpoint_path(end.path);
      progress.set_checkpoint_step(end.step);
      progress.set_failures_in_a_row(0);
      progress.clear_last_failure();
      text = absl::StrFormat("step %d is saved in %s (%.1f s)%s%s", end.step,
                             end.path, end.seconds,
                             end.warning.empty() ? "" : "; ", end.warning);
      spdlog::info("job {}: {}", it->row.id, text);
    } else {
      progress.set_failures_in_a_row(progress.failures_in_a_row() + 1);
      progress.set_last_failure(end.failure);
      text = absl::StrCat("the checkpoint after step ", end.step, " failed (",
                          progress.failures_in_a_row(),
                          " in a row): ", end.failure);
      spdlog::error("job {}: {}", it->row.id, text);
    }
    AddEvent(*it, text);
    Changed(*it);
  };
  events.committing = [this, it] {
    it->row.progress.set_committing(true);
    (void)Write(*it);
  };
}

void Core::OnEnded(Job& job, v1::JobState state, const std::string& reason,
                   bool lost) {
  std::string text = ToValidUtf8(reason);
  job.row.progress.set_checkpointing(false);
  if (state == v1::FAILED && lost && !job.row.cancel_requested &&
      TakeRetry(job)) {
    state = v1::PENDING;
    text = absl::StrCat("restart ", job.row.progress.retries_used(), " of ",
                        job.row.spec.retries(), ": ", text);
  }
  if (state == v1::PENDING) job.row.progress.set_put_back(true);
  Transition(job, state, text, "");
  if (absl::Status status = journal_.DeleteWorkers(job.row.id); !status.ok()) {
    spdlog::error("job {}: {}", job.row.id, std::string(status.message()));
  }
  job.records.Forget();
  // `checked` stays until the run, which may still hold memory, is released.
}

void Core::SaveRuns(bool stop, shm::AbortReason why,
                    const std::string& reason) {
  for (const auto& [id, job] : jobs_) {
    if (job->run == nullptr) continue;
    if (!stop) {
      // A job without checkpoints, or that does not train, goes on.
      (void)job->run->RequestCheckpoint();
      continue;
    }
    if (job->row.spec.checkpoint().folder().empty()) {
      if (stopping_) {
        job->run->Abort(v1::FAILED, why,
                        "daemon stopped; submit the job again");
      }
      continue;
    }
    // Should the daemon not live to see the end of it.
    job->row.progress.set_put_back(true);
    (void)Write(*job);
    job->run->PutBack(why, reason);
  }
}

}  // namespace slidedp::hostd
