#include "hostd/ctl/commands.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/clock.h"
#include "common/base/units.h"
#include "hostd/ctl/doctor.h"
#include "hostd/ctl/follow.h"
#include "hostd/ctl/job_file.h"
#include "hostd/ctl/json_form.h"
#include "hostd/ctl/resolve.h"
#include "hostd/ctl/table.h"
#include "hostd/ctl/yaml_tree.h"
#include "proto/protocol.h"

namespace slidedp::ctl {
namespace {

constexpr size_t kMaxLogLineBytes = 16 * 1024;

int64_t Deadline(double timeout_s) {
  return timeout_s <= 0 ? 0
                        : MonotonicNs() + static_cast<int64_t>(timeout_s * 1e9);
}

}  // namespace

ExitCode Context::Fail(ExitCode code, absl::string_view message) const {
  *environment.err << "slidedpctl: " << std::string(message) << "\n";
  return code;
}

ExitCode Context::FailCall(const absl::Status& status) const {
  return Fail(ExitCodeOfCall(status), status.message());
}

ExitCode Status(const Context& context, const StatusOptions& options) {
  ControlClient client(context.socket);
  std::vector<v1::JobInfo> jobs;
  if (options.id != 0) {
    auto reply = client.Get(options.id);
    if (!reply.ok()) return context.FailCall(reply.status());
    jobs.push_back(reply->info());
  } else {
    auto reply = client.List(options.ended);
    if (!reply.ok()) return context.FailCall(reply.status());
    jobs.assign(reply->jobs().begin(), reply->jobs().end());
    if (context.json()) {
      Json json = JsonDocument();
      json["draining"] = reply->draining();
      json["drain_reason"] = reply->drain_reason();
      json["jobs"] = Json::array();
      for (const v1::JobInfo& job : jobs) json["jobs"].push_back(JsonJob(job));
      context.out() << ToText(json) << "\n";
      return kExitOk;
    }
    if (reply->draining()) {
      *context.environment.err << "draining: no new job starts ("
                               << Printable(reply->drain_reason(), 1000)
                               << ")\n";
    }
  }
  if (context.json()) {
    Json json = JsonDocument();
    json["job"] = JsonJob(jobs[0]);
    context.out() << ToText(json) << "\n";
  } else if (context.output == Output::kName) {
    for (const v1::JobInfo& job : jobs) context.out() << job.id() << "\n";
  } else {
    JobTable(jobs, context.output == Output::kWide, UnixMicros())
        .Print(context.headers, context.color, context.out());
  }
  context.out().flush();
  if (options.watch && options.id != 0) return Watch(context, options.id, 0);
  return kExitOk;
}

ExitCode Watch(const Context& context, uint64_t id, uint64_t from_step) {
  ControlClient client(context.socket);
  FollowOptions options;
  options.progress = !context.json();
  options.json = context.json();
  options.from_step = from_step;
  return FollowJob(client, id, options, context.environment);
}

ExitCode Logs(const Context& context, const LogsOptions& options) {
  ControlClient client(context.socket);
  v1::LogsRequest request;
  request.set_id(options.id);
  request.set_rank(options.rank);
  request.set_follow(options.follow);
  request.set_tail(options.tail);
  const bool was_there = ProbeSocket(context.socket).ok();
  absl::Status status = client.Logs(
      request, *context.environment.interrupt, [&](const v1::LogsReply& reply) {
        std::ostream& out = context.out();
        if (context.json()) {
          Json json = JsonDocument();
          json["id"] = options.id;
          json["rank"] = reply.rank();
          json["line"] = reply.line();
          out << ToText(json) << "\n" << std::flush;
        } else {
          if (options.rank < 0) out << "[rank " << reply.rank() << "] ";
          out << Printable(reply.line(), kMaxLogLineBytes) << "\n"
              << std::flush;
        }
        return static_cast<bool>(out);
      });
  if (absl::IsCancelled(status) && context.environment.interrupt->raised()) {
    return kExitInterrupted;
  }
  if (options.follow && was_there && absl::IsUnavailable(status)) {
    return context.Fail(
        kExitUnreachable,
        absl::StrCat("the daemon went away while the logs of job ", options.id,
                     " were followed: ", status.message(),
                     "; `slidedpctl logs ", options.id,
                     "` shows them all once it is back"));
  }
  return status.ok() ? kExitOk : context.FailCall(status);
}

ExitCode Cancel(const Context& context, const CancelOptions& options) {
  ControlClient client(context.socket);
  ExitCode code = kExitOk;
  std::vector<uint64_t> cancelled;
  for (uint64_t id : options.ids) {
    auto reply = client.Cancel(id);
    if (!reply.ok()) {
      code = context.FailCall(reply.status());
      continue;
    }
    cancelled.push_back(id);
    if (context.json()) {
      Json json = JsonDocument();
      json["job"] = JsonJob(reply->info());
      context.out() << ToText(json) << "\n" << std::flush;
    } else {
      context.out() << id << "\n" << std::flush;
      const v1::JobState state = reply->info().state();
      *context.environment.err << "job " << id
                               << (HasEnded(state) ? " is " : " ends, was ")
                               << Word(state) << "\n";
    }
  }
  if (!options.wait) return code;
  FollowOptions follow;
  follow.any_end_is_ok = true;
  follow.deadline_ns = Deadline(options.timeout_s);
  for (uint64_t id : cancelled) {
    ExitCode ended = FollowJob(client, id, follow, context.environment);
    if (ended != kExitOk) return ended;
  }
  return code;
}

namespace {

ExitCode PrintDrain(const Context& context,
                    const absl::StatusOr<v1::DrainReply>& reply) {
  if (!reply.ok()) return context.FailCall(reply.status());
  if (context.json()) {
    Json json = JsonDocument();
    json["draining"] = reply->draining();
    json["reason"] = reply->reason();
    context.out() << ToText(json) << "\n";
  } else if (reply->draining()) {
    *context.environment.err
        << "draining: no new job starts, running jobs are saved\n";
  } else {
    *context.environment.err << "jobs start again\n";
  }
  return kExitOk;
}

}  // namespace

ExitCode Drain(const Context& context, const std::string& reason, bool stop) {
  return PrintDrain(context, ControlClient(context.socket).Drain(reason, stop));
}

ExitCode Undrain(const Context& context) {
  return PrintDrain(context, ControlClient(context.socket).Undrain());
}

ExitCode Doctor(const Context& context) {
  std::vector<Finding> findings =
      RunDoctor(context.environment, context.socket);
  if (context.json()) {
    context.out() << ToText(JsonDoctor(findings)) << "\n";
  } else if (context.output == Output::kName) {
    for (const Finding& finding : findings) {
      context.out() << finding.check << "\n";
    }
  } else {
    PrintDoctor(findings, context.headers, context.color, context.out());
  }
  return AnyFailed(findings) ? kExitFailure : kExitOk;
}

ExitCode Version(const Context& context) {
  absl::StatusOr<v1::VersionReply> daemon =
      context.socket_error.ok()
          ? ControlClient(context.socket).Version()
          : absl::StatusOr<v1::VersionReply>(context.socket_error);
  if (context.json()) {
    Json json = JsonDocument();
    json["client"] =
        Json{{"version", SLIDEDP_VERSION}, {"protocol", kProtocolVersion}};
    json["daemon"] = nullptr;
    if (daemon.ok()) {
      json["daemon"] = Json{{"version", daemon->version()},
                            {"protocol", daemon->protocol()},
                            {"pid", daemon->pid()},
                            {"started", JsonTime(daemon->started_us())},
                            {"socket", context.socket}};
    }
    context.out() << ToText(json) << "\n";
  } else {
    context.out() << "slidedpctl " << SLIDEDP_VERSION << "\n";
    if (daemon.ok()) {
      context.out() << "slidedpd   " << Printable(daemon->version(), 100)
                    << "\n";
    }
  }
  // A client without a daemon still has a version.
  if (!daemon.ok()) {
    *context.environment.err
        << "slidedpctl: " << std::string(daemon.status().message()) << "\n";
  }
  return kExitOk;
}

}  // namespace slidedp::ctl
