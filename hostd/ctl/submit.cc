// slidedpctl submit.
#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "common/base/clock.h"
#include "common/base/fd.h"
#include "common/base/units.h"
#include "hostd/ctl/commands.h"
#include "hostd/ctl/estimate.h"
#include "hostd/ctl/follow.h"
#include "hostd/ctl/job_file.h"
#include "hostd/ctl/json_form.h"
#include "hostd/ctl/resolve.h"
#include "hostd/ctl/yaml_tree.h"
#include "policy/wire.h"

namespace slidedp::ctl {
namespace {

// At most one byte more than a job file may have, so that what is too large is
// seen to be.
absl::StatusOr<std::string> ReadJobFile(const std::string& file,
                                        std::istream& in) {
  if (file != "-") return ReadFile(file, kMaxYamlBytes);
  std::string text(kMaxYamlBytes + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(in.gcount()));
  return text;
}

ExitCode PrintDryRun(const Context& context, const ResolvedJob& job) {
  Estimate estimate;
  estimate.model = job.spec.model();
  estimate.parameters = job.model.layout.parameters;
  estimate.spec = job.spec;
  estimate.bytes = job.bytes;
  if (context.json()) {
    Json json = JsonEstimate(estimate);
    json["spec"] = JsonSpec(job.spec);
    json["warnings"] = job.warnings;
    context.out() << ToText(json) << "\n";
    return kExitOk;
  }
  context.out() << "job      " << job.spec.name() << ": " << job.spec.steps()
                << " steps of " << job.spec.batch_size() << " sequences, of "
                << job.spec.dataset_sequences() << " in the dataset\n"
                << "output   " << job.spec.output() << "\n";
  PrintEstimate(estimate, context.headers, context.output == Output::kWide,
                context.color, context.out());
  return kExitOk;
}

void PrintSubmitted(const Context& context, const v1::SubmitReply& reply) {
  if (context.json()) {
    Json json = JsonDocument();
    json["id"] = reply.id();
    json["state"] = Word(reply.state());
    json["reason"] = reply.reason();
    context.out() << ToText(json) << "\n" << std::flush;
  } else {
    context.out() << reply.id() << "\n" << std::flush;
  }
}

}  // namespace

ExitCode Submit(const Context& context, const SubmitOptions& options) {
  const Environment& environment = context.environment;
  if (options.print_defaults) {
    context.out() << PrintDefaults();
    return kExitOk;
  }
  if (options.file.empty()) {
    return context.Fail(kExitUsage,
                        "submit: give a job file, or - for standard input");
  }
  absl::Status sets = CheckSets(options.sets);
  if (!sets.ok()) return context.Fail(kExitUsage, sets.message());

  ResolveContext resolve;
  resolve.file = options.file == "-" ? "stdin" : options.file;
  resolve.current_folder = environment.current_folder;
  resolve.logical_cpus = environment.logical_cpus;
  resolve.find_gpus = environment.find_gpus;
  std::string path =
      options.file == "-"
          ? options.file
          : AbsolutePath(options.file, environment.current_folder);
  absl::StatusOr<std::string> text = ReadJobFile(path, *environment.in);
  if (!text.ok()) return context.Fail(kExitFailure, text.status().message());
  absl::StatusOr<v1::JobSpec> spec =
      ParseJobFile(*text, resolve.file, options.sets);
  if (!spec.ok()) return context.Fail(kExitFailure, spec.status().message());
  if (!options.plan.empty()) spec->set_plan(options.plan);
  absl::StatusOr<ResolvedJob> job = ResolveJob(*std::move(spec), resolve);
  if (!job.ok()) return context.Fail(kExitFailure, job.status().message());
  for (const std::string& warning : job->warnings) {
    *environment.err << "slidedpctl: warning: " << warning << "\n";
  }
  if (options.dry_run) return PrintDryRun(context, *job);

  // Only now is a daemon needed.
  if (!context.socket_error.ok()) return context.FailCall(context.socket_error);
  const int64_t deadline_ns =
      options.timeout_s > 0
          ? MonotonicNs() + static_cast<int64_t>(options.timeout_s * 1e9)
          : 0;
  ControlClient client(context.socket);
  v1::SubmitRequest request;
  *request.mutable_spec() = job->spec;
  request.set_client_id(NewClientId());
  absl::StatusOr<v1::SubmitReply> reply = client.Submit(request);
  if (!reply.ok()) return context.FailCall(reply.status());
  PrintSubmitted(context, *reply);
  if (!options.wait && !options.follow) {
    if (reply->state() == v1::PENDING && !reply->reason().empty()) {
      *environment.err << "job " << reply->id()
                       << " is PENDING: " << Printable(reply->reason(), 1000)
                       << "\n";
    }
    return kExitOk;
  }
  FollowOptions follow;
  follow.progress = options.follow && !context.json();
  follow.json = options.follow && context.json();
  follow.deadline_ns = deadline_ns;
  return FollowJob(client, reply->id(), follow, environment);
}

}  // namespace slidedp::ctl
