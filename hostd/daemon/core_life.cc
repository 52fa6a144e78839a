// Start, time and stop of the core.
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "hostd/daemon/core.h"
#include "hostd/daemon/job_state.h"

namespace slidedp::hostd {
namespace {

constexpr int64_t kTickNs = 1'000'000'000;
// For clients to take the last state of their job when the daemon stops.
constexpr int64_t kLastWordsNs = 2'000'000'000;

}  // namespace

Core::Core(CoreParts parts)
    : loop_(*parts.loop),
      journal_(*parts.journal),
      config_(std::move(parts.config)),
      facts_(parts.facts),
      own_uid_(parts.own_uid),
      version_(std::move(parts.version)),
      memory_(std::move(parts.memory)),
      count_gpus_(std::move(parts.gpus)),
      started_us_(UnixMicros()),
      output_posted_(std::make_shared<std::atomic<bool>>(false)) {}

Core::~Core() {
  // Before anything that their events touch.
  gpu_thread_.reset();
  launcher_.reset();
}

absl::Status Core::Recover() {
  SDP_ASSIGN_OR_RETURN(boot_id_, BootId());
  SDP_ASSIGN_OR_RETURN(drain_, journal_.Drain());
  KillLeftovers();
  SDP_ASSIGN_OR_RETURN(std::vector<JobRow> rows, journal_.Jobs());
  for (JobRow& row : rows) {
    const uint64_t id = row.id;
    by_client_id_[{row.uid, row.client_id}] = id;
    jobs_[id] = std::make_unique<Job>(std::move(row), config_.log_folder(id));
    SDP_RETURN_IF_ERROR(RecoverJob(*jobs_[id]));
  }
  if (drain_.draining) spdlog::info("draining: {}", drain_.reason);
  ForgetOldJobs();
  SDP_RETURN_IF_ERROR(StartLauncher());
  loop_.Post([this] { Schedule(); });
  return absl::OkStatus();
}

void Core::KillLeftovers() {
  absl::StatusOr<std::vector<WorkerRow>> workers = journal_.Workers();
  if (!workers.ok()) {
    spdlog::error("{}", std::string(workers.status().message()));
    return;
  }
  for (const WorkerRow& worker : *workers) {
    if (worker.boot_id == boot_id_ &&
        KillLeftover(worker.pid, worker.start_ticks)) {
      spdlog::warn("job {}: killed rank {}, process {}, of an earlier slidedpd",
                   worker.job, worker.rank, worker.pid);
    }
    if (absl::Status status = journal_.DeleteWorkers(worker.job);
        !status.ok()) {
      spdlog::error("{}", std::string(status.message()));
    }
  }
}

absl::Status Core::RecoverJob(Job& job) {
  if (HasEnded(job.row.state)) return absl::OkStatus();
  if (absl::StatusOr<v1::StepRecord> last = job.records.Last(); last.ok()) {
    job.row.step = last->step();
  }
  if (IsActive(job.row.state) && !job.row.cancel_requested &&
      (job.row.progress.put_back() || TakeRetry(job))) {
    job.row.progress.set_checkpointing(false);
    Transition(
        job, v1::PENDING,
        job.row.progress.put_back()
            ? "slidedpd was stopped"
            : absl::StrCat("restart ", job.row.progress.retries_used(), " of ",
                           job.row.spec.retries(), ": slidedpd was killed"),
        "");
    job.row.progress.set_put_back(true);
  }
  if (IsActive(job.row.state)) {
    Recovered recovered =
        RecoverActive(job.row.state, job.row.cancel_requested);
    Transition(job, recovered.state, recovered.reason, "");
  } else {
    absl::StatusOr<CheckedSpec> checked = CheckSpec(job.row.spec, facts_);
    if (checked.ok()) {
      job.demand = MakeDemand(checked->config, checked->layout, checked->plan);
      job.plan = checked->plan;
      job.checked = *std::move(checked);
      return job.unwritten ? Write(job) : absl::OkStatus();
    }
    // This release is stricter than the one that took it.
    Transition(job, v1::FAILED, std::string(checked.status().message()), "");
  }
  // A start on a journal that can't be written would tell other lies later.
  return job.unwritten ? Write(job) : absl::OkStatus();
}

absl::Status Core::StartLauncher() {
  Launcher::Events events;
  events.launched = [this](WorkerId id,
                           const absl::StatusOr<Launched>& launched) {
    loop_.Post([this, id, launched] {
      if (JobRun* run = FindRun(id.job)) run->OnLaunched(id.rank, launched);
    });
  };
  events.exited = [this](WorkerId id, const WorkerExit& exit) {
    loop_.Post([this, id, exit] {
      if (JobRun* run = FindRun(id.job)) run->OnExit(id.rank, exit);
    });
  };
  events.output = [this, posted = output_posted_](WorkerId) {
    if (posted->exchange(true)) return;
    loop_.Post([this, posted] {
      posted->store(false);
      PumpStreams(0);
    });
  };
  SDP_ASSIGN_OR_RETURN(launcher_, Launcher::Start(std::move(events)));
  return absl::OkStatus();
}

void Core::StartTicking() {
  loop_.After(kTickNs, [this] {
    Tick(MonotonicNs());
    StartTicking();
  });
}

void Core::Tick(int64_t now_ns) {
  bool waiting = false;
  for (const auto& [id, job] : jobs_) {
    if (job->run != nullptr) job->run->Tick(now_ns);
    if (job->unwritten) (void)Write(*job);
    waiting |= job->row.state == v1::PENDING;
  }
  // Memory may have become free without our doing.
  if (waiting) Schedule();
}

void Core::Stop(std::function<void()> done) {
  if (stopping_) return;
  stopping_ = true;
  stop_done_ = std::move(done);
  SaveRuns(/*stop=*/true, shm::AbortReason::kShutdown,
           "slidedpd stopped; the job goes on when it is back");
  FinishStopIfIdle();
}

void Core::FinishStopIfIdle() {
  if (!stopping_ || stop_done_ == nullptr || RunCount() > 0) return;
  auto tell = [this] {
    if (stop_done_ == nullptr) return;
    subscriptions_.FinishAll(absl::UnavailableError("slidedpd is stopping"));
    std::function<void()> done = std::move(stop_done_);
    stop_done_ = nullptr;
    done();
  };
  subscriptions_.FinishUnless(
      [this](uint64_t id) {
        const Job* job = FindJob(id);
        return job != nullptr && HasEnded(job->row.state);
      },
      absl::UnavailableError("slidedpd is stopping"));
  if (subscriptions_.empty()) {
    tell();
  } else {
    loop_.After(kLastWordsNs, tell);
  }
}

}  // namespace slidedp::hostd
