// The end of a run, for whatever reason.
#include <signal.h>
#include <sys/socket.h>

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "common/base/clock.h"
#include "common/base/memory.h"
#include "hostd/daemon/job_run.h"
#include "hostd/daemon/log_lines.h"

namespace slidedp::hostd {
namespace {

constexpr int64_t kSecondNs = 1'000'000'000;
// From the abort to SIGTERM: the abort message alone lets a worker say more.
constexpr int64_t kTermAfterNs = 3 * kSecondNs;
// From SIGKILL to giving up on the memory of a run before its end is told.
constexpr int64_t kTearDownGraceNs = 5 * kSecondNs;
// Reading PSS walks every page table: at most a twentieth of the time.
constexpr int64_t kPssShare = 20;

}  // namespace

void JobRun::FailRank(uint32_t rank, const std::string& what, bool refinable) {
  if (phase_ >= Phase::kLeaving) return;
  if (refinable && ranks_[rank].process) refinable_rank_ = rank;
  if (phase_ < Phase::kAborting) {
    trained_ = phase_ >= Phase::kStepping;
    lost_ = refinable || trained_;
  }
  Abort(v1::FAILED, shm::AbortReason::kRankLost,
        absl::StrCat("rank ", rank, " ", what));
}

void JobRun::Abort(v1::JobState state, shm::AbortReason why,
                   const std::string& reason) {
  if (phase_ >= Phase::kAborting) return;
  if (phase_ == Phase::kCommitting) {
    end_note_ = absl::StrCat("; the output in ", job_.spec.output(),
                             " may be complete");
  }
  phase_ = Phase::kAborting;
  end_state_ = state;
  end_reason_ = reason;
  end_began_ns_ = MonotonicNs();
  if (state_ != nullptr) {
    state_->versions().abort().store(static_cast<uint64_t>(why),
                                     std::memory_order_release);
  }
  v1::DaemonMessage message;
  message.mutable_abort()->set_why(reason);
  SendAll(message);
  FinishAll(absl::AbortedError(reason));
  stop_files_ = true;
  // Wakes the run's thread if it waits for rank 0's files.
  if (files_connection_ != nullptr) {
    shutdown(files_connection_->socket.get(), SHUT_RDWR);
  }
  Say(state_word_, absl::StrCat("ending: ", reason));
  TearDown();
  EndIfGone();
}

void JobRun::TearDown() {
  if (checkpoints_ != nullptr) checkpoints_->Close();
  Destroy(Remains{std::move(state_), std::move(engine_)});
}

void JobRun::Destroy(Remains remains) {
  ++destroying_;
  // In a holder, because tasks are copyable.
  auto held = std::make_shared<Remains>(std::move(remains));
  thread_.Post([this, held = std::move(held)]() mutable {
    if (checkpoints_ != nullptr) checkpoints_->Join();
    if (held->engine != nullptr) held->engine->Stop();
    held.reset();
    source_.reset();
    Back([](JobRun& run) {
      --run.destroying_;
      run.files_connection_.reset();
      run.EndIfGone();
    });
  });
}

void JobRun::OnSessionEnd(uint32_t rank) {
  ranks_[rank].session = nullptr;
  FailRank(rank, "broke its session", /*refinable=*/true);
  EndIfGone();
}

void JobRun::OnExit(uint32_t rank, const WorkerExit& exit) {
  ranks_[rank].process = false;
  std::string what = Describe(exit);
  // A worker's last words tell why it left by itself.
  if (exit.signal != SIGKILL && exit.signal != SIGTERM &&
      phase_ != Phase::kLeaving) {
    std::string words = LastLine(LogFileOf(rank));
    if (!words.empty()) absl::StrAppend(&what, ": ", words);
  }
  if (phase_ == Phase::kAborting) {
    if (refinable_rank_ == rank && !terminated_) {
      end_reason_ = absl::StrCat("rank ", rank, " ", what);
      // A worker that left by itself before it trained would do so again.
      if (exit.signal == 0 && !trained_) lost_ = false;
      refinable_rank_.reset();
    }
  } else if (phase_ == Phase::kLeaving) {
    if (exit.code != 0 || exit.signal != 0) {
      Say(state_word_, "workers leave",
          absl::StrCat("rank ", rank, " ", what, " after the output was ",
                       "complete"));
    }
  } else {
    FailRank(rank, what, /*refinable=*/false);
    lost_ |= exit.signal != 0;
  }
  EndIfGone();
}

void JobRun::StoreHeartbeat() {
  if (state_ == nullptr) return;
  state_->versions().heartbeat().store(static_cast<uint64_t>(MonotonicNs()),
                                       std::memory_order_release);
}

void JobRun::MeasureMemory(int64_t now_ns) {
  if (phase_ != Phase::kStepping || now_ns < next_pss_ns_) return;
  next_pss_ns_ = std::numeric_limits<int64_t>::max();  // until it is back
  thread_.Post([this] {
    const int64_t began_ns = MonotonicNs();
    const uint64_t pss_bytes = ProcessPssBytes();
    const int64_t cost_ns = MonotonicNs() - began_ns;
    Back([pss_bytes, cost_ns](JobRun& run) {
      run.own_pss_bytes_ = pss_bytes;
      run.next_pss_ns_ = MonotonicNs() + kPssShare * cost_ns;
      run.TellMemory();
    });
  });
}

void JobRun::TellMemory() {
  uint64_t pss_bytes = own_pss_bytes_, device_bytes = 0;
  bool complete = own_pss_bytes_ != 0;
  for (const Rank& rank : ranks_) {
    complete &= rank.pss_bytes != 0;
    pss_bytes += rank.pss_bytes;
    device_bytes = std::max(device_bytes, rank.device_peak_bytes);
  }
  events_.memory(complete ? pss_bytes : 0, device_bytes);
}

void JobRun::Tick(int64_t now_ns) {
  StoreHeartbeat();
  MeasureMemory(now_ns);
  if (phase_ == Phase::kLoading && !loaded_) {
    const uint64_t all_bytes = load_progress_.all_bytes;
    if (all_bytes > 0) events_.moved(load_progress_.done_bytes, all_bytes);
  }
  if (checkpoints_ != nullptr && phase_ == Phase::kStepping) {
    checkpoints_->Tick(now_ns);
    if (const auto [done_bytes, all_bytes] = checkpoints_->written();
        checkpoints_->busy() && all_bytes > 0) {
      events_.moved(done_bytes, all_bytes);
    }
  }
  if (phase_ >= Phase::kLeaving) {
    PressWorkers(now_ns);
    EndIfGone();
    return;
  }
  if (phase_ == Phase::kJoining) {
    const bool manual = job_.spec.launch() == v1::LAUNCH_KIND_MANUAL;
    const uint64_t patience_s =
        manual ? config_.manual_join_timeout_s : config_.join_timeout_s;
    if (now_ns - started_ns_ > static_cast<int64_t>(patience_s) * kSecondNs) {
      for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
        if (ranks_[rank].joined) continue;
        FailRank(rank, absl::StrCat("did not join within ", patience_s, " s"),
                 /*refinable=*/false);
        return;
      }
    }
  }
  for (uint32_t rank = 0; rank < ranks_.size(); ++rank) {
    if (!ranks_[rank].joined) continue;
    if (now_ns - ranks_[rank].heard_ns >
        static_cast<int64_t>(config_.lease_s) * kSecondNs) {
      FailRank(rank,
               absl::StrCat("has said nothing for ", config_.lease_s, " s"),
               /*refinable=*/false);
      lost_ = true;  // frozen, or its host is
      return;
    }
  }
}

void JobRun::PressWorkers(int64_t now_ns) {
  const int64_t kill_after_ns =
      static_cast<int64_t>(config_.kill_timeout_s) * kSecondNs;
  const int64_t since_ns = now_ns - end_began_ns_;
  if (!terminated_ && since_ns >= std::min(kTermAfterNs, kill_after_ns / 2)) {
    terminated_ = true;
    launcher_.Signal(job_.id, SIGTERM);
  }
  if (!killed_ && since_ns >= kill_after_ns) {
    killed_ = true;
    launcher_.Signal(job_.id, SIGKILL);
  }
  if (killed_ && since_ns >= kill_after_ns + kTearDownGraceNs &&
      destroying_ > 0 && !ended_told_) {
    // A large model is still being read: the job has ended, the memory is
    // accounted for until it is free.
    bool processes = false;
    for (const Rank& rank : ranks_) processes |= rank.process;
    if (!processes) {
      ended_told_ = true;
      events_.ended(end_state_, end_reason_ + end_note_,
                    end_state_ == v1::FAILED && lost_);
    }
  }
}

void JobRun::EndIfGone() {
  if (phase_ != Phase::kLeaving && phase_ != Phase::kAborting) return;
  if (destroying_ > 0) return;
  for (const Rank& rank : ranks_) {
    if (rank.process || rank.session != nullptr) return;
  }
  phase_ = Phase::kEnded;
  if (!ended_told_) {
    ended_told_ = true;
    events_.ended(end_state_, end_reason_ + end_note_,
                  end_state_ == v1::FAILED && lost_);
  }
  events_.released();
}

}  // namespace slidedp::hostd
