// What the command line fills in, and how a verb gets onto it.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <string>

#include "hostd/ctl/bench.h"
#include "hostd/ctl/commands.h"

namespace slidedp::ctl {

struct GlobalOptions {
  std::string socket;
  std::string output = "table";
  bool no_headers = false;
  std::string color = "auto";
};

// Every verb's parsed options, and what to run for the verb that was named.
struct CommandLine {
  GlobalOptions global;
  SubmitOptions submit;
  StatusOptions status;
  LogsOptions logs;
  TraceOptions trace;
  CancelOptions cancel;
  EstimateOptions estimate;
  BenchOptions bench;
  uint64_t id = 0;
  uint64_t from_step = 0;
  std::string reason;
  bool drain_stop = false;
  CheckpointOptions checkpoint;
  std::string verify;
  ExportOptions export_options;
  std::string export_dtype = "source";

  std::function<ExitCode(const Context&)> run;
  bool needs_socket = true;
};

CLI::App* AddVerb(CLI::App& app, const char* name, const char* help,
                  CommandLine& line,
                  std::function<ExitCode(const Context&)> run,
                  bool needs_socket = true);

// checkpoint, verify, export.
void AddCheckpointVerbs(CLI::App& app, CommandLine& line);

}  // namespace slidedp::ctl
