// Memory, weights, steps and output of a run.
#include <sys/random.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/memory.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "hostd/daemon/job_run.h"
#include "hostd/update/topology.h"
#include "proto/protocol.h"

namespace slidedp::hostd {
namespace {

policy::LrScheduleKind KindOf(v1::ScheduleKind kind) {
  switch (kind) {
    case v1::SCHEDULE_KIND_CONSTANT:
      return policy::LrScheduleKind::kConstant;
    case v1::SCHEDULE_KIND_COSINE:
      return policy::LrScheduleKind::kCosine;
    case v1::SCHEDULE_KIND_WSD:
      return policy::LrScheduleKind::kWsd;
    default:
      return policy::LrScheduleKind::kLinear;
  }
}

policy::LrDecay DecayOf(v1::DecayKind kind) {
  switch (kind) {
    case v1::DECAY_KIND_LINEAR:
      return policy::LrDecay::kLinear;
    case v1::DECAY_KIND_ONE_MINUS_SQRT:
      return policy::LrDecay::kOneMinusSqrt;
    default:
      return policy::LrDecay::kCosine;
  }
}

UpdateConfig UpdateConfigOf(const v1::JobSpec& spec, const policy::Plan& plan) {
  UpdateConfig config;
  config.lr = spec.optimizer().lr();
  config.beta1 = spec.optimizer().beta1();
  config.beta2 = spec.optimizer().beta2();
  config.eps = spec.optimizer().eps();
  config.weight_decay = spec.optimizer().weight_decay();
  config.schedule.kind = KindOf(spec.schedule().kind());
  config.schedule.warmup_steps = spec.schedule().warmup_steps();
  config.schedule.total_steps = spec.steps();
  config.schedule.min_lr_ratio = spec.schedule().min_lr_ratio();
  config.schedule.decay_steps = spec.schedule().decay_steps();
  config.schedule.decay = DecayOf(spec.schedule().decay());
  config.max_grad_norm = spec.has_max_grad_norm() ? spec.max_grad_norm() : 0;
  config.threads = plan.update_threads;
  return config;
}

}  // namespace

void JobRun::Reserve() {
  phase_ = Phase::kReserving;
  Say(v1::CONFIGURING, "reserving host memory");
  std::vector<int> nodes;
  for (const Rank& rank : ranks_) nodes.push_back(rank.hello.numa_node());
  thread_.Post([this, layout = job_.checked.layout, plan = plan_, nodes] {
    absl::StatusOr<std::unique_ptr<HostState>> state =
        HostState::Create(absl::StrCat("job-", job_.id), layout, plan,
                          PlaceOnHost(layout, plan, nodes));
    // A holder, because tasks are copyable.
    auto created = std::make_shared<std::unique_ptr<HostState>>();
    if (state.ok()) *created = *std::move(state);
    Back([created, status = state.status()](JobRun& run) {
      run.state_ = std::move(*created);
      run.OnReserved(status);
    });
  });
}

void JobRun::OnReserved(absl::Status status) {
  if (phase_ != Phase::kReserving) {
    // Aborted meanwhile: the first tear-down did not know of this state.
    Destroy(Remains{std::move(state_), nullptr});
    return;
  }
  if (!status.ok()) {
    Abort(v1::FAILED, shm::AbortReason::kJobFailed,
          absl::StrCat("no host memory: ", status.message()));
    return;
  }
  segments_taken_ = true;
  phase_ = Phase::kLoading;
  StoreHeartbeat();
  Say(v1::CONFIGURING, "loading weights and data");
  for (Rank& rank : ranks_) {
    if (getrandom(rank.nonce.data(), rank.nonce.size(), 0) !=
        static_cast<ssize_t>(rank.nonce.size())) {
      Abort(v1::FAILED, shm::AbortReason::kJobFailed,
            std::string(ErrnoStatus(errno, "getrandom").message()));
      return;
    }
    rank.nonce_good = true;
    v1::DaemonMessage message;
    message.mutable_attach()->set_socket(config_.attach_socket());
    message.mutable_attach()->set_nonce(rank.nonce.data(), rank.nonce.size());
    rank.session->Send(message);
  }
}

void JobRun::OnAttach(std::shared_ptr<AttachConnection> connection,
                      const v1::AttachRequest& request) {
  // One answer for every mistake: it tells a stranger nothing.
  auto refuse = [&] {
    (void)SendAttachError(connection->socket.get(),
                          "no such job, rank or nonce");
  };
  if (phase_ != Phase::kLoading || request.rank() >= ranks_.size() ||
      connection->uid != job_.uid) {
    return refuse();
  }
  Rank& rank = ranks_[request.rank()];
  if (!rank.nonce_good || request.nonce().size() != rank.nonce.size() ||
      std::memcmp(request.nonce().data(), rank.nonce.data(),
                  rank.nonce.size()) != 0) {
    return refuse();
  }
  rank.nonce_good = false;
  absl::Status sent =
      SendSegments(connection->socket.get(), state_->segments());
  if (!sent.ok()) {
    FailRank(request.rank(),
             absl::StrCat("could not be given its segments: ", sent.message()),
             /*refinable=*/true);
    return;
  }
  if (request.rank() == 0) {
    files_connection_ = std::move(connection);
    LoadSource();
  }
}

void JobRun::OnReady(uint32_t rank, const v1::Ready& ready) {
  if (ready.dataset_sequences() != job_.spec.dataset_sequences()) {
    FailRank(rank,
             absl::StrCat("found ", ready.dataset_sequences(),
                          " sequences in the job's data, there were ",
                          job_.spec.dataset_sequences(),
                          " at submission: the file has changed"),
             /*refinable=*/false);
    return;
  }
  ranks_[rank].ready = true;
  StartStepsIfReady();
}

void JobRun::OnCollectiveIds(uint32_t rank, const v1::CollectiveIds& ids) {
  // Rank 0's, once, while the ranks wait for them.
  if (phase_ != Phase::kLoading || rank != 0 || ids_passed_ ||
      !NeedsCollectiveIds() || ranks_[rank].nonce_good) {
    return Unexpected(rank, "collective_ids");
  }
  bool good = ids.ids_size() == policy::kCommunicators;
  for (int i = 0; good && i < ids.ids_size(); ++i) {
    good = ids.ids(i).size() == kCollectiveIdBytes &&
           (i == 0 || ids.ids(i) != ids.ids(i - 1));
  }
  if (!good) {
    FailRank(rank,
             absl::StrCat("sent ", ids.ids_size(),
                          " collective ids that are "
                          "not ",
                          policy::kCommunicators, " different ones of ",
                          kCollectiveIdBytes,
                          " bytes; slidedp-worker and "
                          "slidedpd must be of one release"),
             /*refinable=*/false);
    return;
  }
  ids_passed_ = true;
  v1::DaemonMessage message;
  *message.mutable_collective_ids() = ids;
  SendAll(message);
}

void JobRun::StartStepsIfReady() {
  if (!loaded_ || !EveryRank(&Rank::ready)) return;
  phase_ = Phase::kStepping;
  measures_.emplace(MeasuredJob());
  UpdateConfig config = UpdateConfigOf(job_.spec, plan_);
  config.recorder = &update_spans_;
  config.first_step = steps_applied_ = begin_.step;
  config.updates_applied = begin_.updates_applied;
  config.clip_history = begin_.clip_history;
  UpdateEngine::OnBoundary on_boundary;
  if (checkpoints_ != nullptr) {
    on_boundary = [checkpoints = checkpoints_.get()](const Boundary& boundary) {
      return checkpoints->OnBoundary(boundary);
    };
  }
  if (!memory_.Begin(begin_.step, begin_memory_)) {
    Say(state_word_, "loading weights and data",
        "evaluated on other sequences than before: the best loss so far is "
        "forgotten");
  }
  events_.begun(begin_.step, memory_.evaluations());
  engine_ = UpdateEngine::Start(
      *state_, config,
      [this](const StepResult& result) {
        Back([result](JobRun& run) { run.OnStep(result); });
      },
      [this](const absl::Status& status) {
        Back([status](JobRun& run) {
          run.Abort(v1::FAILED, shm::AbortReason::kJobFailed,
                    std::string(status.message()));
        });
      },
      std::move(on_boundary));
  if (checkpoints_ != nullptr) {
    checkpoints_->Start(
        {state_.get(), engine_.get(), source_.has_value() ? &*source_ : nullptr,
         files_connection_},
        MonotonicNs());
  }
  v1::DaemonMessage message;
  message.mutable_start()->set_first_step(begin_.step);
  SendAll(message);
  Say(v1::RUNNING, "", "running");
}

absl::StatusOr<std::shared_ptr<TraceCollector>> JobRun::Trace(uint32_t steps) {
  if (auto other = trace_.lock(); other != nullptr && !other->complete()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job ", job_.id, " is being traced already; wait for that to end"));
  }
  // The step after the one under way is the first whole one.
  const uint64_t first = steps_applied_ + 1;
  if (phase_ != Phase::kStepping || first >= job_.spec.steps()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job ", job_.id,
        phase_ < Phase::kStepping ? " has not begun to train; try again when "
                                    "it has"
                                  : " has no whole step left to trace"));
  }
  const uint64_t count = std::min<uint64_t>(steps, job_.spec.steps() - first);
  auto trace = std::make_shared<TraceCollector>(
      first, count, static_cast<uint32_t>(ranks_.size()));
  SendAll(trace->Request());
  trace_ = trace;
  return trace;
}

void JobRun::CompleteIfDone() {
  if (phase_ != Phase::kStepping || !EveryRank(&Rank::steps_done) ||
      steps_applied_ != last_step() ||
      (checkpoints_ != nullptr && checkpoints_->busy())) {
    return;
  }
  if (put_back_.has_value()) {
    // The last step came before the wish: what is left is quickly done.
    put_back_.reset();
  }
  if (checkpoints_ != nullptr && checkpoints_->SaveMissed(steps_applied_)) {
    return;
  }
  phase_ = Phase::kStopping;
  Say(v1::COMPLETING, "ending the update workers",
      absl::StrCat("all ", steps_applied_, " steps are applied"));
  thread_.Post([this, engine = engine_.get()] {
    engine->Stop();
    Back([pss_bytes = ProcessPssBytes()](JobRun& run) {
      run.own_pss_bytes_ = pss_bytes;
      run.TellMemory();
      run.OnEngineStopped();
    });
  });
}

void JobRun::OnEngineStopped() {
  if (phase_ != Phase::kStopping) return;
  if (job_.spec.output().empty()) {
    LeaveComplete("the result is dropped: the job has no output");
    return;
  }
  phase_ = Phase::kWriting;
  Say(v1::COMPLETING, absl::StrCat("writing ", job_.spec.output()));
  v1::DaemonMessage message;
  message.mutable_open_output();
  ranks_[0].session->Send(message);
  WriteOutput();
}

void JobRun::WriteOutput() {
  thread_.Post([this, state = state_.get(), connection = files_connection_] {
    std::vector<std::string> warnings;
    auto write = [&]() -> absl::Status {
      SDP_ASSIGN_OR_RETURN(
          NamedFiles files,
          ReceiveFiles(connection->socket.get(), v1::FilesMessage::OUTPUT));
      SDP_ASSIGN_OR_RETURN(std::vector<int> fds, MatchOutput(*source_, files));
      SDP_ASSIGN_OR_RETURN(
          warnings, WriteParameters(*source_, *state, fds, &stop_files_));
      return absl::OkStatus();
    };
    absl::Status status = write();
    if (absl::Status sent =
            SendFilesReply(connection->socket.get(), status, warnings);
        status.ok()) {
      status = sent;
    }
    Back([status, warnings](JobRun& run) { run.OnWritten(status, warnings); });
  });
}

void JobRun::OnWritten(const absl::Status& status,
                       const std::vector<std::string>& warnings) {
  if (phase_ != Phase::kWriting) return;
  if (!status.ok()) {
    return OnFilesFailed(absl::StrCat("writing ", job_.spec.output()), status);
  }
  for (const std::string& warning : warnings) {
    Say(v1::COMPLETING, absl::StrCat("writing ", job_.spec.output()), warning);
  }
  written_ = true;
  CommitIfWritten();
}

void JobRun::CommitIfWritten() {
  if (!written_ || !output_opened_) return;
  phase_ = Phase::kCommitting;
  events_.committing();
  v1::DaemonMessage message;
  message.mutable_commit_output();
  ranks_[0].session->Send(message);
}

void JobRun::OnCommitted(const std::string& path) {
  LeaveComplete(absl::StrCat("output is in ", path));
}

void JobRun::LeaveComplete(const std::string& event) {
  phase_ = Phase::kLeaving;
  end_state_ = v1::COMPLETED;
  end_reason_ = stop_reason_;
  end_began_ns_ = MonotonicNs();
  Say(v1::COMPLETING, "workers leave", event);
  v1::DaemonMessage message;
  message.mutable_leave();
  SendAll(message);
  FinishAll(absl::OkStatus());
  TearDown();
}

}  // namespace slidedp::hostd
