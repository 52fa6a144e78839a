// slidedpctl export: a checkpoint's model, without a daemon but to find a job's
// checkpoint.
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "hostd/ctl/commands.h"
#include "hostd/ctl/export_model.h"
#include "hostd/ctl/resolve.h"

namespace slidedp::ctl {
namespace {

// A job's id means its newest checkpoint.
absl::StatusOr<std::string> CheckpointOf(const Context& context,
                                         const std::string& from) {
  uint64_t id = 0;
  if (!absl::SimpleAtoi(from, &id)) {
    return AbsolutePath(from, context.environment.current_folder);
  }
  SDP_RETURN_IF_ERROR(context.socket_error);
  SDP_ASSIGN_OR_RETURN(const v1::GetReply reply,
                       ControlClient(context.socket).Get(id));
  const std::string& path = reply.info().progress().checkpoint_path();
  if (!path.empty()) return path;
  return absl::FailedPreconditionError(absl::StrCat(
      "job ", id, " has saved nothing yet; `slidedpctl checkpoint ", id,
      "` saves it"));
}

}  // namespace

ExitCode Export(const Context& context, const ExportOptions& options) {
  const absl::StatusOr<std::string> from = CheckpointOf(context, options.from);
  if (!from.ok()) return context.FailCall(from.status());
  const std::string to =
      AbsolutePath(options.to, context.environment.current_folder);
  Interrupt& interrupt = *context.environment.interrupt;
  interrupt.Hold(true);
  const absl::Status status =
      ExportModel(context.environment, *from, to, options.float32);
  interrupt.Hold(false);
  if (absl::IsCancelled(status)) {
    *context.environment.err << "slidedpctl: interrupted; " << to
                             << " is not written\n";
    return kExitInterrupted;
  }
  if (!status.ok()) return context.Fail(kExitFailure, status.message());
  context.out() << to << "\n";
  return kExitOk;
}

}  // namespace slidedp::ctl
