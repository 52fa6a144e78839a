// slidedpctl checkpoint.
#include "absl/strings/str_cat.h"
#include "common/base/clock.h"
#include "hostd/ctl/byte_progress.h"
#include "hostd/ctl/commands.h"
#include "hostd/ctl/json_form.h"
#include "hostd/ctl/yaml_tree.h"

namespace slidedp::ctl {
namespace {

// Where it stands; erased when it has ended.
void ShowSaving(const Environment& environment, const v1::JobInfo& info) {
  if (!environment.err_is_terminal) return;
  *environment.err << "\r\x1b[K";
  if (info.progress().checkpointing() && info.load_bytes() > 0) {
    *environment.err << ByteProgress::Line("saving", info.loaded_bytes(),
                                           info.load_bytes());
  }
  *environment.err << std::flush;
}

}  // namespace

ExitCode Checkpoint(const Context& context, const CheckpointOptions& options) {
  ControlClient client(context.socket);
  const absl::StatusOr<v1::CheckpointReply> reply =
      client.Checkpoint(options.id);
  if (!reply.ok()) return context.FailCall(reply.status());
  if (!options.wait) {
    *context.environment.err << "job " << options.id
                             << " will be saved at its next step\n";
    return kExitOk;
  }
  const int64_t deadline_ns =
      options.timeout_s > 0
          ? MonotonicNs() + static_cast<int64_t>(options.timeout_s * 1e9)
          : 0;
  v1::JobInfo info;
  const absl::Status watched = client.Watch(
      options.id, kNoSteps, deadline_ns, *context.environment.interrupt,
      [&](const v1::WatchReply& message) {
        if (message.has_info()) info = message.info();
        ShowSaving(context.environment, info);
        return info.progress().checkpoints_ended() < reply->ended();
      });
  if (absl::IsCancelled(watched) && context.environment.interrupt->raised()) {
    return kExitInterrupted;
  }
  if (absl::IsDeadlineExceeded(watched)) {
    return context.Fail(
        kExitTimeout,
        absl::StrCat("job ", options.id, " is not saved yet; it will be"));
  }
  if (!watched.ok()) return context.FailCall(watched);
  const v1::JobProgress& progress = info.progress();
  if (progress.checkpoints_ended() < reply->ended()) {
    return context.Fail(
        kExitWrongState,
        absl::StrCat("job ", options.id, " ended before it could be saved"));
  }
  if (progress.failures_in_a_row() > 0) {
    return context.Fail(
        kExitFailure, absl::StrCat("job ", options.id, " could not be saved: ",
                                   Printable(progress.last_failure(), 1000)));
  }
  if (context.json()) {
    Json json = JsonDocument();
    json["job"] = JsonJob(info);
    context.out() << ToText(json) << "\n";
  } else {
    context.out() << Printable(progress.checkpoint_path(), 4096) << "\n";
  }
  return kExitOk;
}

}  // namespace slidedp::ctl
