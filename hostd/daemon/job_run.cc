// Joining and planning of a run. Memory to output is in job_run_steps.cc, the
// end in job_run_end.cc.
#include "hostd/daemon/job_run.h"

#include <sys/socket.h>

#include <algorithm>
#include <limits>
#include <map>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "hostd/daemon/gpus.h"
#include "hostd/daemon/log_lines.h"
#include "policy/gpu_memory.h"
#include "policy/wire.h"
#include "proto/protocol.h"

namespace slidedp::hostd {
namespace {

// A worker's words, short enough for a status and a line of a table.
std::string Cut(const std::string& text) {
  constexpr size_t kMaxWordsBytes = 1000;
  return ToValidUtf8(text.substr(0, kMaxWordsBytes));
}

const char* Word(v1::DeviceKind device) {
  return device == v1::DEVICE_KIND_CUDA ? "cuda" : "cpu";
}

}  // namespace

JobRun::JobRun(EventLoop& loop, Launcher& launcher, const Config& config,
               RunJob job, RunEvents events)
    : loop_(loop),
      launcher_(launcher),
      config_(config),
      job_(std::move(job)),
      events_(std::move(events)),
      ranks_(job_.spec.ranks()),
      problem_(job_.checked.problem),
      plan_(job_.checked.plan),
      memory_(job_.spec),
      self_(std::make_shared<JobRun*>(this)) {
  MakeCheckpoints();
}

JobRun::~JobRun() {
  // Only a daemon that leaves at once destroys a run before its end.
  if (checkpoints_ != nullptr) checkpoints_->Close();
  if (files_connection_ != nullptr) {
    shutdown(files_connection_->socket.get(), SHUT_RDWR);
  }
}

void JobRun::Back(std::function<void(JobRun&)> task) {
  loop_.Post([self = std::weak_ptr<JobRun*>(self_), task = std::move(task)] {
    if (std::shared_ptr<JobRun*> run = self.lock()) task(**run);
  });
}

void JobRun::Say(v1::JobState state, const std::string& reason,
                 const std::string& event) {
  state_word_ = state;
  events_.progress(state, reason, event);
}

bool JobRun::EveryRank(bool Rank::*flag) const {
  for (const Rank& rank : ranks_) {
    if (!(rank.*flag)) return false;
  }
  return true;
}

void JobRun::SendAll(const v1::DaemonMessage& message) {
  for (Rank& rank : ranks_) {
    if (rank.session != nullptr) rank.session->Send(message);
  }
}

void JobRun::FinishAll(const absl::Status& status) {
  for (Rank& rank : ranks_) {
    if (rank.session != nullptr) rank.session->Finish(status);
  }
}

// ---- Joining ----

void JobRun::Start() {
  started_ns_ = MonotonicNs();
  if (job_.spec.launch() == v1::LAUNCH_KIND_DAEMON) LaunchWorkers();
  SayWhoIsMissing();
}

void JobRun::LaunchWorkers() {
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    LaunchRequest request;
    request.id = {job_.id, rank};
    request.argv = {config_.worker_binary,    "--job",
                    absl::StrCat(job_.id),    "--rank",
                    absl::StrCat(rank),       "--socket",
                    config_.control_socket(), "--device",
                    Word(job_.spec.device())};
    request.environment = config_.worker_environment;
    if (!job_.gpus.empty()) {
      // All ranks see all of the job's GPUs, and take them by rank: so each can
      // tell whether its GPU reaches the others.
      std::erase_if(request.environment, [](const std::string& entry) {
        return absl::StartsWith(entry, kVisibleGpus);
      });
      request.environment.push_back(VisibleGpus(job_.gpus));
    }
    request.environment.push_back("PATH=/usr/local/bin:/usr/bin:/bin");
    request.environment.push_back(absl::StrCat("HOME=", job_.home));
    request.environment.push_back(absl::StrCat("USER=", job_.user));
    request.environment.push_back(absl::StrCat("LOGNAME=", job_.user));
    request.uid = job_.uid;
    request.gid = job_.gid;
    request.groups = job_.groups;
    request.log_file = LogFileOf(rank);
    request.log_max_bytes = config_.log_max_bytes;
    ranks_[rank].process = true;
    launcher_.Launch(std::move(request));
  }
}

std::string JobRun::LogFileOf(uint32_t rank) const {
  return absl::StrCat(config_.log_folder(job_.id), "/rank-", rank, ".log");
}

void JobRun::SayWhoIsMissing() {
  std::vector<std::string> missing;
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!ranks_[rank].joined) missing.push_back(absl::StrCat(rank));
  }
  std::string reason =
      absl::StrCat("waiting for rank", missing.size() > 1 ? "s " : " ",
                   absl::StrJoin(missing, ", "), " to join");
  if (job_.spec.launch() == v1::LAUNCH_KIND_MANUAL) {
    absl::StrAppend(&reason, " (slidedp-worker --job ", job_.id, " --rank ",
                    missing[0], " --device ", Word(job_.spec.device()), ")");
  }
  Say(v1::CONFIGURING, reason);
}

void JobRun::OnLaunched(uint32_t rank,
                        const absl::StatusOr<Launched>& launched) {
  if (!launched.ok()) {
    ranks_[rank].process = false;
    FailRank(
        rank,
        absl::StrCat("could not be started: ", launched.status().message()),
        /*refinable=*/false);
    EndIfGone();
    return;
  }
  ranks_[rank].pid = launched->pid;
  events_.launched(rank, *launched);
}

absl::Status JobRun::OnHello(WorkerSession* session, const v1::Hello& hello) {
  if (hello.protocol() != kProtocolVersion) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the worker speaks protocol ", hello.protocol(), ", slidedpd ",
        kProtocolVersion, "; use the slidedp-worker of this release"));
  }
  if (hello.rank() >= ranks_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("job ", job_.id, " has no rank ", hello.rank(),
                     ", only 0 to ", ranks_.size() - 1));
  }
  Rank& rank = ranks_[hello.rank()];
  if (rank.joined) {
    return absl::AlreadyExistsError(absl::StrCat(
        "rank ", hello.rank(), " of job ", job_.id, " has joined already"));
  }
  if (phase_ != Phase::kJoining) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", job_.id, " is ending"));
  }
  if (job_.spec.launch() == v1::LAUNCH_KIND_DAEMON && rank.pid != 0 &&
      hello.pid() != static_cast<uint32_t>(rank.pid)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "slidedpd starts the workers of job ", job_.id, " itself; submit with ",
        "launch: manual to start them by hand"));
  }
  if (hello.device() != job_.spec.device()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job ", job_.id, " is for device ", Word(job_.spec.device()),
        ", this worker has another; start it with --device ",
        Word(job_.spec.device())));
  }
  if (hello.device() == v1::DEVICE_KIND_CUDA &&
      hello.device_memory_bytes() == 0) {
    return absl::InvalidArgumentError(
        "the worker does not say how much memory its GPU has; use the "
        "slidedp-worker of this release");
  }
  session->job = job_.id;
  session->rank = hello.rank();
  rank.session = session;
  rank.joined = true;
  rank.hello = hello;
  rank.heard_ns = MonotonicNs();
  if (EveryRank(&Rank::joined)) {
    Propose();
  } else {
    SayWhoIsMissing();
  }
  return absl::OkStatus();
}

// ---- The plan ----

absl::Status JobRun::PlanForDevices() {
  uint64_t gpu_bytes = std::numeric_limits<uint64_t>::max();
  for (const Rank& rank : ranks_) {
    if (!rank.hello.peer_access()) problem_.peer_access = false;
    gpu_bytes = std::min(gpu_bytes, rank.hello.device_memory_bytes());
  }
  if (problem_.device == policy::DeviceKind::kCpu) {
    // Otherwise it is the plan of the submission.
    if (!problem_.peer_access) {
      SDP_ASSIGN_OR_RETURN(plan_, policy::MakePlan(problem_));
    }
    return absl::OkStatus();
  }
  SDP_ASSIGN_OR_RETURN(problem_.device_memory_bytes,
                       policy::GpuBufferBytes(problem_, gpu_bytes));
  SDP_ASSIGN_OR_RETURN(plan_, policy::MakePlan(problem_));
  return absl::OkStatus();
}

std::string JobRun::DescribeDevices() const {
  std::map<std::string, int> counts;
  for (const Rank& rank : ranks_) {
    ++counts[absl::StrCat(Cut(rank.hello.device_description()), ", ",
                          FormatBytes(rank.hello.device_memory_bytes()))];
  }
  std::vector<std::string> devices;
  for (const auto& [device, count] : counts) {
    devices.push_back(absl::StrCat(count, " x ", device));
  }
  return absl::StrCat("devices: ", absl::StrJoin(devices, "; "),
                      problem_.ranks > 1 && !problem_.peer_access
                          ? "; they do not reach each other"
                          : "");
}

void JobRun::Propose() {
  if (phase_ == Phase::kJoining) {
    absl::Status planned = PlanForDevices();
    if (!planned.ok()) {
      Abort(v1::FAILED, shm::AbortReason::kJobFailed,
            std::string(planned.message()));
      return;
    }
    if (problem_.device == policy::DeviceKind::kCuda) {
      Say(v1::CONFIGURING, "planning", DescribeDevices());
    }
  }
  if (absl::Status status = events_.plan(plan_); !status.ok()) {
    Abort(v1::FAILED, shm::AbortReason::kJobFailed,
          std::string(status.message()));
    return;
  }
  phase_ = Phase::kProposing;
  for (Rank& rank : ranks_) {
    rank.answered = false;
    rank.refusal.clear();
  }
  v1::DaemonMessage message;
  *message.mutable_propose()->mutable_spec() = job_.spec;
  *message.mutable_propose()->mutable_plan() = policy::ToWire(plan_);
  message.mutable_propose()->set_resume(job_.resume);
  message.mutable_propose()->set_attempt(job_.attempt);
  message.mutable_propose()->set_output_may_be_there(job_.output_may_be_there);
  SendAll(message);
  Say(v1::CONFIGURING, "agreeing on a plan");
}

void JobRun::OnAnswer() {
  if (!EveryRank(&Rank::answered)) return;
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    const std::string& refusal = ranks_[rank].refusal;
    if (refusal.empty()) continue;
    CheckedSpec asked = job_.checked;
    asked.problem = problem_;
    absl::StatusOr<policy::Plan> fallback = FallbackPlan(asked, plan_);
    if (!fallback.ok()) {
      FailRank(rank,
               absl::StrCat("refused the plan: ", refusal, " (",
                            fallback.status().message(), ")"),
               /*refinable=*/false);
      return;
    }
    Say(v1::CONFIGURING, "agreeing on another plan",
        absl::StrCat("rank ", rank, " refused the plan: ", refusal));
    plan_ = *std::move(fallback);
    Propose();
    return;
  }
  Reserve();
}

// ---- Messages ----

void JobRun::OnMessage(uint32_t rank, const v1::WorkerMessage& message) {
  Rank& from = ranks_[rank];
  from.heard_ns = MonotonicNs();
  if (phase_ >= Phase::kLeaving) return;
  switch (message.what_case()) {
    case v1::WorkerMessage::kHeartbeat:
      from.pss_bytes = message.heartbeat().pss_bytes();
      from.device_peak_bytes = message.heartbeat().device_peak_bytes();
      return TellMemory();
    case v1::WorkerMessage::kFailed:
      return FailRank(rank,
                      absl::StrCat("failed: ", Cut(message.failed().why())),
                      /*refinable=*/false);
    case v1::WorkerMessage::kAccept:
    case v1::WorkerMessage::kRefuse:
      if (phase_ != Phase::kProposing || from.answered) break;
      from.answered = true;
      if (message.has_refuse()) {
        from.refusal = message.refuse().why().empty()
                           ? "without a reason"
                           : Cut(message.refuse().why());
      }
      return OnAnswer();
    case v1::WorkerMessage::kReady:
      if (phase_ != Phase::kLoading || from.ready || from.nonce_good ||
          (NeedsCollectiveIds() && !ids_passed_)) {
        break;
      }
      return OnReady(rank, message.ready());
    case v1::WorkerMessage::kCollectiveIds:
      return OnCollectiveIds(rank, message.collective_ids());
    case v1::WorkerMessage::kStepsDone:
      if (phase_ != Phase::kStepping || from.steps_done) break;
      from.steps_done = true;
      return CompleteIfDone();
    case v1::WorkerMessage::kEvalReport:
      return OnEvalReport(rank, message.eval_report());
    case v1::WorkerMessage::kOutputOpened:
      if (phase_ != Phase::kWriting || rank != 0 || output_opened_) break;
      output_opened_ = true;
      return CommitIfWritten();
    case v1::WorkerMessage::kOutputCommitted:
      if (rank != 0 || !(phase_ == Phase::kCommitting ||
                         (phase_ == Phase::kLoading && !from.ready &&
                          job_.output_may_be_there))) {
        break;
      }
      return OnCommitted(message.output_committed().path());
    case v1::WorkerMessage::kCheckpointCommitted:
    case v1::WorkerMessage::kCheckpointFailed:
      if (rank != 0 || checkpoints_ == nullptr ||
          !checkpoints_->OnMessage(message)) {
        break;
      }
      return CompleteIfDone();
    case v1::WorkerMessage::kStepSpans:
      if (auto trace = trace_.lock()) {
        trace->OnRank(rank, message.step_spans());
      }
      return;
    case v1::WorkerMessage::kHello:
    case v1::WorkerMessage::WHAT_NOT_SET:
      break;
  }
  Unexpected(rank, message.GetDescriptor()->FindFieldByNumber(
                       message.what_case()) == nullptr
                       ? "an unknown message"
                       : message.GetDescriptor()
                             ->FindFieldByNumber(message.what_case())
                             ->name());
}

void JobRun::Unexpected(uint32_t rank, absl::string_view message) {
  FailRank(rank,
           absl::StrCat("sent ", message,
                        " out of turn; slidedp-worker and slidedpd must be of "
                        "one release"),
           /*refinable=*/false);
}

}  // namespace slidedp::hostd
