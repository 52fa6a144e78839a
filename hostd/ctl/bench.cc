#include "hostd/ctl/bench.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/base/fd.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "hostd/ctl/bench_files.h"
#include "hostd/ctl/bench_process.h"
#include "hostd/ctl/bench_reference.h"
#include "hostd/ctl/bench_report.h"
#include "hostd/ctl/follow.h"
#include "hostd/ctl/job_file.h"
#include "hostd/ctl/resolve.h"
#include "hostd/ctl/yaml_tree.h"

namespace slidedp::ctl {
namespace {

// Beyond these, tokens repeat.
constexpr uint64_t kMaxDatasetTokens = uint64_t{1} << 24;
constexpr uint64_t kSeed = 1234;

// What a benchmark sets itself.
constexpr absl::string_view kOwnKeys[] = {"model",
                                          "data",
                                          "output",
                                          "steps",
                                          "epochs",
                                          "max_tokens",
                                          "random_weights_seed"};

absl::Status CheckOptions(const BenchOptions& options) {
  for (const std::string& set : options.sets) {
    for (absl::string_view key : kOwnKeys) {
      if (absl::StartsWith(set, absl::StrCat(key, "="))) {
        return InvalidInput("bench", "--set", set, "bench sets this itself",
                            "use bench's own options");
      }
    }
  }
  const struct {
    const char* flag;
    uint64_t value, most;
  } numbers[] = {
      {"--ranks", options.ranks, 64},
      {"--seq", options.sequence_length, uint64_t{1} << 20},
      {"--micro-batch-size", options.micro_batch_size, 1 << 20},
      {"--batch-size", options.batch_size, 1 << 20},
      {"--steps", options.steps, 1'000'000},
      {"--warmup", std::max<uint64_t>(options.warmup, 1), 1'000'000}};
  for (const auto& [flag, value, most] : numbers) {
    if (value >= 1 && value <= most) continue;
    return InvalidInput("bench", flag, absl::StrCat(value), "out of range",
                        absl::StrCat("choose 1 to ", most));
  }
  return CheckSets(options.sets);
}

absl::StatusOr<model::Shape> ShapeOf(const BenchOptions& options) {
  SDP_ASSIGN_OR_RETURN(model::Shape shape, model::FindShape(options.model));
  if (options.layers > 0) shape.layers = options.layers;
  if (options.vocab > 0) shape.vocab = options.vocab;
  // Benchmarks may go beyond what a model was trained for.
  shape.max_position = std::max<int64_t>(
      shape.max_position, static_cast<int64_t>(options.sequence_length));
  return shape;
}

std::string Quoted(const std::string& text) { return Json(text).dump(); }

// The job's file, as a user would write it.
std::string JobText(const BenchOptions& options, const std::string& folder) {
  std::string text = absl::StrCat(
      "name: bench-", options.model,                                    //
      "\nmodel: ", Quoted(absl::StrCat(folder, "/model")),              //
      "\ndata: ", Quoted(absl::StrCat(folder, "/tokens.safetensors")),  //
      "\nranks: ", options.ranks,                                       //
      "\ndevice: ", options.device,                                     //
      "\nsequence_length: ", options.sequence_length,                   //
      "\nbatch_size: ", options.batch_size,                             //
      "\nmicro_batch_size: ", options.micro_batch_size,                 //
      "\nsteps: ", options.steps + options.warmup,                      //
      "\nrandom_weights_seed: ", kSeed, "\n");
  if (options.gpu_memory_limit_gib > 0) {
    absl::StrAppend(&text, "tuning: {gpu_memory_limit_gib: ",
                    options.gpu_memory_limit_gib, "}\n");
  }
  return text;
}

// Everything that one call of bench holds.
class Benchmark {
 public:
  Benchmark(const Context& context, const BenchOptions& options)
      : context_(context),
        environment_(context.environment),
        options_(options) {}

  absl::StatusOr<BenchRun> Run();

  // What the job ended with, if it was not COMPLETED.
  ExitCode failure() const { return failure_; }

 private:
  absl::StatusOr<v1::JobSpec> MakeSpec(const std::string& folder);
  absl::Status Train(const std::string& folder, BenchRun& run);
  absl::Status Submit(const std::string& socket, BenchRun& run);
  std::string Program(const char* name) const {
    return absl::StrCat(environment_.program_folder, "/", name);
  }

  const Context& context_;
  const Environment& environment_;
  const BenchOptions& options_;
  model::Shape shape_;
  ExitCode failure_ = kExitFailure;
};

absl::StatusOr<v1::JobSpec> Benchmark::MakeSpec(const std::string& folder) {
  const uint64_t needed =
      (options_.steps + options_.warmup) * options_.batch_size;
  const uint64_t most = kMaxDatasetTokens / options_.sequence_length;
  SDP_RETURN_IF_ERROR(WriteBenchModel(folder, shape_));
  SDP_RETURN_IF_ERROR(WriteRandomTokens(
      absl::StrCat(folder, "/tokens.safetensors"),
      std::clamp<uint64_t>(needed, 1, std::max<uint64_t>(most, 1)),
      options_.sequence_length, shape_.vocab));
  SDP_ASSIGN_OR_RETURN(v1::JobSpec spec, ParseJobFile(JobText(options_, folder),
                                                      "bench", options_.sets));
  ResolveContext resolve;
  resolve.file = "bench";
  resolve.current_folder = environment_.current_folder;
  resolve.logical_cpus = environment_.logical_cpus;
  resolve.find_gpus = environment_.find_gpus;
  SDP_ASSIGN_OR_RETURN(ResolvedJob job, ResolveJob(std::move(spec), resolve));
  for (const std::string& warning : job.warnings) {
    *environment_.err << "slidedpctl: warning: " << warning << "\n";
  }
  return job.spec;
}

absl::Status Benchmark::Submit(const std::string& socket, BenchRun& run) {
  ControlClient client(socket);
  v1::SubmitRequest request;
  *request.mutable_spec() = run.spec;
  request.set_client_id(NewClientId());
  SDP_ASSIGN_OR_RETURN(const v1::SubmitReply reply, client.Submit(request));
  FollowOptions follow;
  follow.progress = true;
  follow.explain_interrupt = false;
  follow.on_step = [&run](const v1::StepRecord& record) {
    run.records.push_back(record);
  };
  const ExitCode code = FollowJob(client, reply.id(), follow, environment_);
  if (code == kExitInterrupted) {
    (void)client.Cancel(reply.id());
    return absl::CancelledError("interrupted; the job was cancelled");
  }
  if (code != kExitOk) {
    failure_ = code;
    std::string why;
    if (absl::StatusOr<v1::GetReply> got = client.Get(reply.id()); got.ok()) {
      why = absl::StrCat(": ", Printable(got->info().reason(), 1000));
    }
    return absl::AbortedError(absl::StrCat("the job did not complete", why));
  }
  SDP_ASSIGN_OR_RETURN(v1::GetReply got, client.Get(reply.id()));
  run.plan = std::move(*got.mutable_plan());
  run.info = std::move(*got.mutable_info());
  return absl::OkStatus();
}

absl::Status Benchmark::Train(const std::string& folder, BenchRun& run) {
  if (!context_.socket.empty() && ProbeSocket(context_.socket).ok()) {
    return Submit(context_.socket, run);
  }
  if (context_.socket_given) return ProbeSocket(context_.socket);
  SDP_ASSIGN_OR_RETURN(
      const std::unique_ptr<ChildProcess> daemon,
      StartPrivateDaemon(Program("slidedpd"), folder, *environment_.interrupt));
  return Submit(PrivateSocket(folder), run);
}

absl::StatusOr<BenchRun> Benchmark::Run() {
  SDP_ASSIGN_OR_RETURN(shape_, ShapeOf(options_));
  SDP_ASSIGN_OR_RETURN(const ScratchFolder folder,
                       ScratchFolder::Create(environment_.temporary_folder));
  BenchRun run;
  run.model = options_.model;
  run.warmup = options_.warmup;
  run.command = environment_.command;
  SDP_ASSIGN_OR_RETURN(run.spec, MakeSpec(folder.path()));
  SDP_ASSIGN_OR_RETURN(const ModelFacts facts,
                       ReadModelFacts(run.spec.model()));
  run.config = facts.config;
  run.parameters = facts.layout.parameters;
  if (!options_.compute_only) {
    SDP_RETURN_IF_ERROR(Train(folder.path(), run));
  }
  if (options_.compute_only || options_.reference) {
    const v1::JobSpec& spec = run.spec;
    SDP_ASSIGN_OR_RETURN(
        run.reference,
        RunReference(Program("slidedp-bench-ops"), folder.path(), options_,
                     Word(spec.device()),
                     CeilDiv(spec.batch_size(),
                             uint64_t{spec.ranks()} * spec.micro_batch_size()),
                     *environment_.interrupt));
  }
  return run;
}

}  // namespace

ExitCode Bench(const Context& context, const BenchOptions& given) {
  BenchOptions options = given;
  options.sets.insert(options.sets.begin(), given.keys.begin(),
                      given.keys.end());
  if (options.batch_size == 0) {
    options.batch_size = options.ranks * options.micro_batch_size;
  }
  if (absl::Status status = CheckOptions(options); !status.ok()) {
    return context.Fail(kExitUsage, status.message());
  }
  // From here on there are a folder and processes to be removed.
  Interrupt& interrupt = *context.environment.interrupt;
  interrupt.Hold(true);
  Benchmark benchmark(context, options);
  absl::StatusOr<BenchRun> run = benchmark.Run();
  interrupt.Hold(false);
  if (!run.ok()) {
    if (interrupt.raised()) {
      return context.Fail(kExitInterrupted, run.status().message());
    }
    return context.Fail(benchmark.failure(), run.status().message());
  }
  absl::StatusOr<Json> report = JsonBench(*run);
  if (!report.ok())
    return context.Fail(kExitFailure, report.status().message());
  if (!options.json_file.empty()) {
    const std::string path =
        AbsolutePath(options.json_file, context.environment.current_folder);
    if (absl::Status status = WriteFileAtomically(path, ToText(*report) + "\n");
        !status.ok()) {
      return context.Fail(kExitFailure, status.message());
    }
  }
  if (context.json()) {
    context.out() << ToText(*report) << "\n";
  } else {
    PrintBench(*report, context.out());
  }
  return kExitOk;
}

}  // namespace slidedp::ctl
