#include "hostd/ctl/follow.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>

#include "common/base/clock.h"
#include "hostd/ctl/json_form.h"
#include "hostd/ctl/progress.h"

namespace slidedp::ctl {
namespace {

constexpr int64_t kReconnectNs = 30'000'000'000;
constexpr auto kReconnectPause = std::chrono::milliseconds(250);

ExitCode CodeOfEnd(v1::JobState state, const FollowOptions& options) {
  if (options.any_end_is_ok || state == v1::COMPLETED) return kExitOk;
  return state == v1::CANCELLED ? kExitCancelled : kExitFailure;
}

class Follower {
 public:
  Follower(uint64_t id, const FollowOptions& options,
           const Environment& environment)
      : id_(id),
        options_(options),
        environment_(environment),
        next_step_(options.from_step),
        progress_(environment.err_is_terminal, environment.err_columns,
                  *environment.err) {}

  // False when the job has ended.
  bool OnMessage(const v1::WatchReply& message) {
    connected_ns_ = MonotonicNs();
    if (message.has_step()) {
      next_step_ = std::max(next_step_, message.step().step());
      if (options_.on_step) options_.on_step(message.step());
      if (options_.progress) progress_.OnStep(message.step(), connected_ns_);
      if (options_.json) Print("step_record", JsonStep(message.step()));
    } else if (message.has_eval()) {
      // One that was told before the connection was lost comes again.
      if (next_eval_ > message.eval().step()) return true;
      next_eval_ = message.eval().step() + 1;
      if (options_.progress) progress_.OnEval(message.eval());
      if (options_.json) Print("eval_record", JsonEval(message.eval()));
    } else if (message.has_info()) {
      if (options_.progress) progress_.OnInfo(message.info(), connected_ns_);
      if (options_.json) Print("job", JsonJob(message.info()));
      if (HasEnded(message.info().state())) end_ = message.info().state();
    }
    return !end_.has_value();
  }

  ExitCode Run(ControlClient& client) {
    connected_ns_ = MonotonicNs();
    for (;;) {
      absl::Status status = client.Watch(
          id_, next_step_, options_.deadline_ns, *environment_.interrupt,
          [this](const v1::WatchReply& message) { return OnMessage(message); });
      if (end_.has_value()) {
        progress_.Finish();
        return CodeOfEnd(*end_, options_);
      }
      // A stream that ends before the job has is a daemon that stops.
      bool lost = status.ok() || absl::IsUnavailable(status);
      if (lost && MonotonicNs() - connected_ns_ < kReconnectNs) {
        std::this_thread::sleep_for(kReconnectPause);
        if (!environment_.interrupt->raised()) continue;
        status = absl::CancelledError("interrupted");
      }
      progress_.Finish();
      return Explain(status);
    }
  }

 private:
  ExitCode Explain(const absl::Status& status) {
    std::ostream& err = *environment_.err;
    if (absl::IsCancelled(status) && environment_.interrupt->raised()) {
      if (!options_.explain_interrupt) return kExitInterrupted;
      err << "job " << id_ << " goes on; `slidedpctl watch " << id_
          << "` follows it again, `slidedpctl cancel " << id_ << "` ends it\n";
      return kExitInterrupted;
    }
    if (absl::IsDeadlineExceeded(status)) {
      err << "job " << id_ << " has not ended in the time given; it goes on\n";
      return kExitTimeout;
    }
    if (status.ok()) {
      err << "slidedpctl: the daemon stopped reporting job " << id_ << "\n";
      return kExitUnreachable;
    }
    err << "slidedpctl: " << std::string(status.message()) << "\n";
    return ExitCodeOfCall(status);
  }

  void Print(const char* name, Json value) {
    Json line = JsonDocument();
    line["id"] = id_;
    line[name] = std::move(value);
    *environment_.out << ToText(line) << "\n" << std::flush;
  }

  const uint64_t id_;
  const FollowOptions& options_;
  const Environment& environment_;
  uint64_t next_step_;
  uint64_t next_eval_ = 0;
  int64_t connected_ns_ = 0;
  Progress progress_;
  std::optional<v1::JobState> end_;
};

}  // namespace

ExitCode FollowJob(ControlClient& client, uint64_t id,
                   const FollowOptions& options,
                   const Environment& environment) {
  return Follower(id, options, environment).Run(client);
}

}  // namespace slidedp::ctl
