// `slidedpctl trace`: the next steps of a job as a Chrome trace.
#include "common/trace/trace.h"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <set>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "hostd/ctl/commands.h"
#include "hostd/ctl/json_form.h"
#include "hostd/ctl/resolve.h"
#include "proto/spans.h"

namespace slidedp::ctl {
namespace {

// Complete or not there.
absl::Status WriteTrace(const std::vector<trace::Process>& processes,
                        const std::string& path) {
  const std::string temporary = absl::StrCat(path, ".partial");
  {
    std::ofstream file(temporary, std::ios::trunc);
    trace::WriteChromeTrace(processes, file);
    file.flush();
    if (!file.good()) {
      std::remove(temporary.c_str());
      return absl::InternalError(
          absl::StrCat(path, ": can't be written; name another file"));
    }
  }
  std::error_code error;
  std::filesystem::rename(temporary, path, error);
  if (!error) return absl::OkStatus();
  std::remove(temporary.c_str());
  return absl::InternalError(absl::StrCat(path, ": ", error.message()));
}

// Or until it has ended, which the request for a trace then says.
absl::Status AwaitTraining(ControlClient& client, uint64_t id,
                           Interrupt& interrupt) {
  return client.Watch(id, kNoSteps, /*deadline_ns=*/0, interrupt,
                      [](const v1::WatchReply& message) {
                        return !message.has_info() ||
                               message.info().state() < v1::RUNNING;
                      });
}

}  // namespace

ExitCode Trace(const Context& context, const TraceOptions& options) {
  const std::string path = AbsolutePath(
      options.file.empty() ? absl::StrCat("job-", options.id, "-trace.json")
                           : options.file,
      context.environment.current_folder);
  std::set<std::string> names;
  std::map<std::string, std::vector<trace::Span>> spans_of;
  std::map<std::string, std::set<uint64_t>> steps_of;
  uint64_t first = 0, last = 0, count = 0;
  absl::Status status, malformed;
  v1::TraceRequest request;
  request.set_id(options.id);
  request.set_steps(options.steps);
  ControlClient client(context.socket);
  Interrupt& interrupt = *context.environment.interrupt;
  if (options.wait) status = AwaitTraining(client, options.id, interrupt);
  if (status.ok()) {
    status = client.Trace(request, interrupt, [&](const v1::TraceReply& reply) {
      first = reply.first_step();
      last = reply.last_step();
      absl::StatusOr<std::vector<trace::Span>> spans =
          FromWire(reply.spans(), names);
      if (!spans.ok()) {
        malformed = spans.status();
        return false;
      }
      count += spans->size();
      std::vector<trace::Span>& all = spans_of[reply.process()];
      for (const trace::Span& span : *spans) {
        steps_of[reply.process()].insert(span.step);
        all.push_back(span);
      }
      return true;
    });
  }
  if (status.ok()) status = malformed;
  if (absl::IsCancelled(status) && interrupt.raised()) {
    *context.environment.err << "slidedpctl: interrupted; " << path
                             << " is not written, the job goes on\n";
    return kExitInterrupted;
  }
  if (!status.ok()) return context.FailCall(status);

  // "rank 10" after "rank 9", the daemon last.
  std::vector<trace::Process> processes;
  for (uint32_t rank = 0;; ++rank) {
    auto found = spans_of.find(absl::StrCat("rank ", rank));
    if (found == spans_of.end()) break;
    processes.push_back({found->first, std::move(found->second)});
  }
  const size_t ranks = processes.size();
  processes.push_back({"slidedpd", std::move(spans_of["slidedpd"])});
  for (const trace::Process& process : processes) {
    const size_t have = steps_of[process.name].size();
    if (have == last - first + 1) continue;
    *context.environment.err
        << "slidedpctl: " << process.name << ": " << last - first + 1 - have
        << " of the steps were overwritten before they could be sent; trace "
           "fewer steps\n";
  }
  if (absl::Status written = WriteTrace(processes, path); !written.ok()) {
    return context.Fail(kExitFailure, written.message());
  }
  if (context.json()) {
    Json json = JsonDocument();
    json["trace"] =
        Json{{"job", options.id}, {"first_step", first}, {"last_step", last},
             {"ranks", ranks},    {"spans", count},      {"file", path}};
    context.out() << ToText(json) << "\n";
  } else {
    context.out() << path << "\n";
    *context.environment.err << "steps " << first << " to " << last
                             << " of job " << options.id << ", " << count
                             << " spans; open it in ui.perfetto.dev or "
                             << "chrome://tracing\n";
  }
  return kExitOk;
}

}  // namespace slidedp::ctl
