#include "hostd/ctl/cli.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <functional>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "hostd/ctl/command_line.h"
#include "hostd/ctl/socket_path.h"

namespace slidedp::ctl {
namespace {

constexpr const char* kFooter =
    "Exit codes: 0 ok, 1 failure (or the job FAILED), 2 usage, 3 no such job,\n"
    "4 permission, 5 no daemon answers, 6 wrong state, 7 timeout, 8 the job "
    "was\n"
    "CANCELLED, 130 Ctrl-C while following.\n"
    "Data goes to standard output, everything else to standard error.";

bool UseColor(const GlobalOptions& options, const Environment& environment) {
  if (options.color == "always") return true;
  if (options.color == "never") return false;
  return environment.out_is_terminal && environment.term != "dumb" &&
         environment.no_color.empty();
}

Output OutputOf(const std::string& word) {
  if (word == "wide") return Output::kWide;
  if (word == "json") return Output::kJson;
  if (word == "name") return Output::kName;
  return Output::kTable;
}

void AddGlobals(CLI::App& app, GlobalOptions& options) {
  app.add_option("--socket", options.socket,
                 "The daemon's socket. Default: SLIDEDP_SOCKET, else "
                 "/run/slidedpd/slidedpd.sock if it exists, else "
                 "$XDG_RUNTIME_DIR/slidedpd/slidedpd.sock, else "
                 "/tmp/slidedpd-UID/slidedpd.sock")
      ->type_name("PATH");
  app.add_option("-o,--output", options.output, "table, wide, json or name")
      ->type_name("FORMAT")
      ->check(CLI::IsMember({"table", "wide", "json", "name"}));
  app.add_flag("--no-headers", options.no_headers, "Tables without titles");
  app.add_option("--color", options.color, "auto, always or never")
      ->type_name("WHEN")
      ->check(CLI::IsMember({"auto", "always", "never"}));
}

void AddSubmit(CLI::App& app, CommandLine& line) {
  SubmitOptions& o = line.submit;
  CLI::App* verb = AddVerb(
      app, "submit",
      "Check a job as you, hand it to the daemon, print its id. Relative "
      "paths in the job file and in --set start at the current folder.",
      line, [&o](const Context& c) { return Submit(c, o); },
      /*needs_socket=*/false);
  verb->add_option("FILE", o.file, "Job file (YAML); - is standard input")
      ->type_name("");
  verb->add_option("--set", o.sets,
                   "Over the file, e.g. --set optimizer.lr=1e-4; may be "
                   "repeated; the value is YAML")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false)
      ->take_all();
  verb->add_option("--plan", o.plan, "Plan file, as slidedpctl plan prints")
      ->type_name("FILE");
  verb->add_option_function<std::string>(
          "--resume",
          [&o](const std::string& from) {
            o.sets.push_back(absl::StrCat("resume=", from));
          },
          "Go on from the newest good checkpoint (auto), or from this one")
      ->type_name("auto|DIR");
  verb->add_flag("--wait", o.wait, "Return when the job has ended");
  verb->add_flag("--follow", o.follow, "Show progress until the job has ended");
  verb->add_option("--timeout", o.timeout_s, "Wait at most this long")
      ->type_name("SECONDS")
      ->check(CLI::PositiveNumber);
  verb->add_flag("--dry-run", o.dry_run,
                 "Check everything, show plan and memory, submit nothing");
  verb->add_flag("--print-defaults", o.print_defaults,
                 "Print a job file with every key, its default and meaning");
}

void AddQueries(CLI::App& app, CommandLine& line) {
  StatusOptions& status = line.status;
  CLI::App* verb =
      AddVerb(app, "status", "Jobs that have not ended, or one job", line,
              [&status](const Context& c) { return Status(c, status); });
  verb->add_option("ID", status.id, "Job")
      ->type_name("")
      ->check(CLI::PositiveNumber);
  verb->add_flag("-a,--all", status.ended, "Also jobs that have ended");
  verb->add_flag("--watch", status.watch, "With ID: then follow it to its end");

  AddVerb(app, "top", "What jobs are doing, again and again on a terminal",
          line, [](const Context& c) { return Top(c); });

  verb = AddVerb(app, "show", "Everything about a job", line,
                 [&line](const Context& c) { return Show(c, line.id); });
  verb->add_option("ID", line.id, "Job")->required()->type_name("");

  verb = AddVerb(
      app, "watch", "Follow a job to its end", line,
      [&line](const Context& c) { return Watch(c, line.id, line.from_step); });
  verb->add_option("ID", line.id, "Job")->required()->type_name("");
  verb->add_option("--from-step", line.from_step, "Only steps after this one")
      ->type_name("STEP");

  LogsOptions& logs = line.logs;
  verb = AddVerb(app, "logs", "What a job's workers said", line,
                 [&logs](const Context& c) { return Logs(c, logs); });
  verb->add_option("ID", logs.id, "Job")->required()->type_name("");
  verb->add_flag("-f,--follow", logs.follow, "Go on until the job has ended");
  verb->add_option("--tail", logs.tail, "Only the last lines of each rank")
      ->type_name("N");
  verb->add_option("--rank", logs.rank, "Only this rank")
      ->type_name("R")
      ->check(CLI::NonNegativeNumber);

  TraceOptions& trace = line.trace;
  verb = AddVerb(app, "trace",
                 "Write what every lane of a running job does in its next "
                 "steps, as a Chrome trace (Perfetto reads it)",
                 line, [&trace](const Context& c) { return Trace(c, trace); });
  verb->add_option("ID", trace.id, "Job")->required()->type_name("");
  verb->add_option("--steps", trace.steps, "So many")
      ->type_name("N")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  verb->add_flag("--wait", trace.wait, "Until the job trains");
  // Here, -o is not the global --output.
  verb->add_option("-o,--file", trace.file, "Default: job-ID-trace.json")
      ->type_name("FILE");
}

void AddControls(CLI::App& app, CommandLine& line) {
  CancelOptions& cancel = line.cancel;
  CLI::App* verb =
      AddVerb(app, "cancel", "End jobs; nothing is written", line,
              [&cancel](const Context& c) { return Cancel(c, cancel); });
  verb->add_option("ID", cancel.ids, "Jobs")->required()->type_name("");
  verb->add_flag("--wait", cancel.wait, "Return when they have ended");
  verb->add_option("--timeout", cancel.timeout_s, "Wait at most this long")
      ->type_name("SECONDS")
      ->check(CLI::PositiveNumber);

  verb = AddVerb(app, "drain",
                 "Start no new job; running jobs are saved and go on "
                 "(administrators)",
                 line, [&line](const Context& c) {
                   return Drain(c, line.reason, line.drain_stop);
                 });
  verb->add_option("--reason", line.reason, "Shown to users")
      ->required()
      ->type_name("TEXT");

  verb->add_flag("--stop", line.drain_stop,
                 "Running jobs are saved and go back to the queue");

  AddVerb(app, "undrain", "Start jobs again (administrators)", line,
          [](const Context& c) { return Undrain(c); });
}

// What estimate and plan are asked about. `--ranks 2` and the like are --set's
// short forms here.
void AddSizes(CLI::App* verb, EstimateOptions& o) {
  verb->add_option("SOURCE", o.source, "Model folder, or a job file")
      ->required()
      ->type_name("");
  auto add = [&](const char* flag, const char* key, const char* help) {
    verb->add_option_function<std::string>(
            flag,
            [&o, key](const std::string& value) {
              o.keys.push_back(absl::StrCat(key, "=", value));
            },
            help)
        ->type_name("VALUE");
  };
  add("--data", "data", "A dataset: says what a step of it holds");
  add("--packing", "packing", "true: several documents share a sequence");
  add("--ranks", "ranks", "Workers");
  add("--device", "device", "auto, cpu or cuda");
  verb->add_option("--gpu-memory", o.gpu_memory_gib,
                   "Of each GPU; default: what this host's have")
      ->type_name("GIB")
      ->check(CLI::PositiveNumber);
  add("--gpu-memory-limit", "tuning.gpu_memory_limit_gib",
      "GiB of each GPU that the job may use");
  add("--sequence-length", "sequence_length", "Tokens of a sequence");
  add("--batch-size", "batch_size", "Sequences a step");
  add("--micro-batch-size", "micro_batch_size", "Sequences at once");
  add("--max-grad-norm", "max_grad_norm", "null: no clipping");
  add("--params-route", "routes.params", "auto, full or sharded");
  add("--grads-route", "routes.grads", "auto, gpu_root, gpu_sharded or cpu");
  add("--reduce", "routes.reduce", "auto, fp32 or bf16");
  add("--window-slots", "tuning.window_slots", "Layers on the device");
  add("--keep", "tuning.keep", "none, selective, full, or [segments]");
  add("--offload", "tuning.offload", "Share of it in host memory, 0 to 1");
  add("--plan", "plan", "Plan file");
  verb->add_option("--set", o.sets, "Any other key of a job file")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false)
      ->take_all();
}

void AddEstimate(CLI::App& app, CommandLine& line) {
  EstimateOptions& o = line.estimate;
  AddSizes(AddVerb(
               app, "estimate",
               "The memory a job takes, to the byte, from the model's "
               "config.json, and with --data what its steps hold; needs no "
               "daemon and no weights",
               line, [&o](const Context& c) { return EstimateModel(c, o); },
               /*needs_socket=*/false),
           o);
  AddSizes(AddVerb(
               app, "plan",
               "The plan that a job would get, as a plan file: change it and "
               "give it to submit, estimate or bench",
               line, [&o](const Context& c) { return PrintPlan(c, o); },
               /*needs_socket=*/false),
           o);
}

void AddBench(CLI::App& app, CommandLine& line) {
  BenchOptions& o = line.bench;
  CLI::App* verb = AddVerb(
      app, "bench",
      "Train a published shape from random weights and say how fast; starts a "
      "daemon of its own if none answers",
      line, [&o](const Context& c) { return Bench(c, o); },
      /*needs_socket=*/false);
  auto number = [verb](const char* flag, auto& value, const char* help) {
    verb->add_option(flag, value, help)
        ->type_name("N")
        ->check(CLI::NonNegativeNumber);
  };
  verb->add_option("--model", o.model, "Shape, e.g. qwen3-8b")
      ->required()
      ->type_name("NAME");
  number("--layers", o.layers, "Instead of the shape's");
  number("--vocab", o.vocab, "Instead of the shape's");
  number("--ranks", o.ranks, "Workers");
  number("--seq", o.sequence_length, "Tokens of a sequence");
  number("--micro-batch-size", o.micro_batch_size, "Sequences at once");
  number("--batch-size", o.batch_size,
         "Sequences a step, all ranks; 0: one micro-batch on each rank");
  number("--steps", o.steps, "Measured steps");
  number("--warmup", o.warmup, "Steps before them");
  number("--gpu-memory-limit", o.gpu_memory_limit_gib, "GiB; 0: the GPU's");
  verb->add_option("--device", o.device, "auto, cpu or cuda")
      ->type_name("DEVICE")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  auto add = [&](const char* flag, const char* key, const char* help) {
    verb->add_option_function<std::string>(
            flag,
            [&o, key](const std::string& value) {
              o.keys.push_back(absl::StrCat(key, "=", value));
            },
            help)
        ->type_name("VALUE");
  };
  add("--keep", "tuning.keep", "none, selective, full, or [segments]");
  add("--offload", "tuning.offload", "Share of it in host memory, 0 to 1");
  add("--plan", "plan", "Plan file");
  verb->add_option("--set", o.sets, "Any other key of a job file")
      ->type_name("KEY=VALUE")
      ->allow_extra_args(false)
      ->take_all();
  verb->add_option("--json", o.json_file, "Also write one JSON object here")
      ->type_name("FILE");
  verb->add_flag("--compute-only", o.compute_only,
                 "Only the reference: one device, weights resident, no host "
                 "traffic");
  verb->add_flag("--reference", o.reference,
                 "Also the reference, and the excess over it");
  verb->add_flag("--recompute", o.recompute,
                 "The reference keeps only the layers' inputs");
}

void AddOthers(CLI::App& app, CommandLine& line) {
  AddVerb(app, "doctor", "Check this host and the daemon", line,
          [](const Context& c) { return Doctor(c); });
  AddVerb(
      app, "version", "Versions of slidedpctl and the daemon", line,
      [](const Context& c) { return Version(c); },
      /*needs_socket=*/false);
}

}  // namespace

CLI::App* AddVerb(CLI::App& app, const char* name, const char* help,
                  CommandLine& line,
                  std::function<ExitCode(const Context&)> run,
                  bool needs_socket) {
  CLI::App* verb = app.add_subcommand(name, help);
  verb->fallthrough();
  verb->callback([&line, run = std::move(run), needs_socket] {
    line.run = run;
    line.needs_socket = needs_socket;
  });
  return verb;
}

int RunCtl(const std::vector<std::string>& args,
           const Environment& environment) {
  CommandLine line;
  CLI::App app("Submits, watches and ends fine-tuning jobs of slidedpd.",
               "slidedpctl");
  app.footer(kFooter);
  app.require_subcommand(1);
  AddGlobals(app, line.global);
  AddSubmit(app, line);
  AddQueries(app, line);
  AddControls(app, line);
  AddEstimate(app, line);
  AddBench(app, line);
  AddCheckpointVerbs(app, line);
  AddOthers(app, line);
  try {
    std::vector<std::string> reversed(args.rbegin(), args.rend());
    app.parse(std::move(reversed));
  } catch (const CLI::ParseError& e) {
    int code = app.exit(e, *environment.out, *environment.err);
    return code == 0 ? kExitOk : kExitUsage;
  }
  Context context{environment};
  context.output = OutputOf(line.global.output);
  context.headers = !line.global.no_headers;
  context.color = UseColor(line.global, environment);
  context.socket_given =
      !line.global.socket.empty() || !environment.socket.empty();
  absl::StatusOr<std::string> socket =
      SocketPath(line.global.socket, environment);
  if (socket.ok()) {
    context.socket = *std::move(socket);
  } else if (line.needs_socket) {
    return context.FailCall(socket.status());
  } else {
    context.socket_error = socket.status();
  }
  int code = line.run(context);
  environment.out->flush();
  return code;
}

}  // namespace slidedp::ctl
