// Heartbeats, the watch over abort word and stream, and every way to end early.
#include <unistd.h>

#include <chrono>

#include "absl/strings/str_cat.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/memory.h"
#include "common/shm/words.h"
#include "worker/session/process_stats.h"
#include "worker/session/session.h"

namespace slidedp::session {
namespace {

constexpr auto kWatchInterval = std::chrono::milliseconds(50);
constexpr int64_t kHeartbeatNs = 1'000'000'000;
// Reading PSS walks every page table: at most a twentieth of the time.
constexpr int64_t kPssShare = 20;

const char* AbortText(uint64_t reason) {
  switch (static_cast<shm::AbortReason>(reason)) {
    case shm::AbortReason::kCancelled:
      return "the job was cancelled";
    case shm::AbortReason::kRankLost:
      return "another rank was lost";
    case shm::AbortReason::kJobFailed:
      return "the job failed";
    case shm::AbortReason::kShutdown:
      return "the daemon stops";
    case shm::AbortReason::kNone:
      break;
  }
  return "the daemon aborted the job";
}

}  // namespace

void Session::OnStreamEnd(const absl::Status& status) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (leaving_) return;
  }
  if (status.ok() || absl::IsUnavailable(status) || absl::IsCancelled(status)) {
    End(kDaemonGone,
        absl::StrCat("the connection to the daemon at ", config_.socket,
                     " ended", status.message().empty() ? "" : ": ",
                     status.message()));
  }
  End(kFailed,
      absl::StrCat("the daemon refuses this rank: ", status.message()));
}

void Session::Watch() {
  int64_t heartbeat_ns = 0, pss_ns = 0;
  uint64_t pss_bytes = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (
      !changed_.wait_for(lock, kWatchInterval, [this] { return stopping_; })) {
    const int64_t now = MonotonicNs();
    if (versions_ != nullptr) {
      // Versions has no const writes: the mapping is read-only.
      const uint64_t abort = shm::Versions(versions_->data())
                                 .abort()
                                 .load(std::memory_order_acquire);
      if (abort != 0 && !leaving_) {
        lock.unlock();
        End(kAborted, absl::StrCat("aborted: ", AbortText(abort)));
      }
      const model::StateLayout& layout = proposal_->layout;
      const size_t buckets =
          policy::MakeGradBuckets(layout, proposal_->plan).size();
      shm::Reports(reports_->data(), buckets, policy::ReportedRows(layout))
          .heartbeat(config_.rank)
          .store(static_cast<uint64_t>(now), std::memory_order_release);
    }
    if (leaving_) continue;
    lock.unlock();
    SendTrace();
    lock.lock();
    if (now < heartbeat_ns || leaving_) continue;
    heartbeat_ns = now + kHeartbeatNs;
    v1::WorkerMessage message;
    v1::Heartbeat& heartbeat = *message.mutable_heartbeat();
    if (watched_trainer_ != nullptr) {
      heartbeat.set_step(watched_trainer_->steps_enqueued());
    }
    heartbeat.set_device_peak_bytes(device_peak_bytes_);
    lock.unlock();
    if (now >= pss_ns) {
      pss_bytes = ProcessPssBytes();
      const int64_t cost = MonotonicNs() - now;
      pss_ns = now + kPssShare * cost;
    }
    heartbeat.set_pss_bytes(pss_bytes);
    Send(message);
    lock.lock();
  }
}

void Session::Fail(const absl::Status& status) {
  const std::string why(status.message());
  {
    std::lock_guard<std::mutex> lock(mutex_);
    leaving_ = true;
  }
  v1::WorkerMessage message;
  message.mutable_failed()->set_why(why);
  if (!stream_->Send(message)) {
    End(kDaemonGone,
        absl::StrCat("the connection to the daemon ended, and: ", why));
  }
  // The daemon ends the stream when it has read this.
  stream_->Close(kFarewellNs);
  End(kFailed, why);
}

void Session::End(ExitCode code, const std::string& why) {
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (ending_) {
      // The first caller's _exit ends this wait.
      changed_.wait(lock, [] { return false; });
    }
    ending_ = true;
  }
  spdlog::error("job {}: {}", config_.job, why);
  // No destructors: other threads are in the middle of things. The segments and
  // the output go with the process; the sweeper sees to what is on disk.
  _exit(code);
}

}  // namespace slidedp::session
