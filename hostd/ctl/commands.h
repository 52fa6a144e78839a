// The verbs of slidedpctl, one function each, over parsed options.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hostd/ctl/client.h"
#include "hostd/ctl/environment.h"
#include "hostd/ctl/exit_codes.h"

namespace slidedp::ctl {

enum class Output { kTable, kWide, kJson, kName };

// What every verb has.
struct Context {
  const Environment& environment;
  Output output = Output::kTable;
  bool headers = true;
  bool color = false;         // on stdout
  std::string socket = {};    // resolved; empty: see socket_error
  bool socket_given = false;  // by --socket or SLIDEDP_SOCKET
  absl::Status socket_error = absl::OkStatus();

  std::ostream& out() const { return *environment.out; }
  // "slidedpctl: ..." on stderr; returns `code`.
  ExitCode Fail(ExitCode code, absl::string_view message) const;
  ExitCode FailCall(const absl::Status& status) const;
  bool json() const { return output == Output::kJson; }
};

struct SubmitOptions {
  std::string file;  // "-": standard input
  std::string plan;  // before the file's; empty: the file's
  std::vector<std::string> sets;
  bool wait = false;
  bool follow = false;
  bool dry_run = false;
  bool print_defaults = false;
  double timeout_s = 0;  // 0: none
};
ExitCode Submit(const Context& context, const SubmitOptions& options);

struct StatusOptions {
  uint64_t id = 0;  // 0: all
  bool ended = false;
  bool watch = false;
};
ExitCode Status(const Context& context, const StatusOptions& options);

// Again and again on a terminal, until Ctrl-C.
ExitCode Top(const Context& context);

ExitCode Show(const Context& context, uint64_t id);
ExitCode Watch(const Context& context, uint64_t id, uint64_t from_step);

struct LogsOptions {
  uint64_t id = 0;
  bool follow = false;
  uint32_t tail = 0;
  int rank = -1;
};
ExitCode Logs(const Context& context, const LogsOptions& options);

struct TraceOptions {
  uint64_t id = 0;
  uint32_t steps = 3;
  bool wait = false;  // until it trains
  std::string file;   // empty: job-ID-trace.json
};
ExitCode Trace(const Context& context, const TraceOptions& options);

struct CancelOptions {
  std::vector<uint64_t> ids;
  bool wait = false;
  double timeout_s = 0;
};
ExitCode Cancel(const Context& context, const CancelOptions& options);

ExitCode Drain(const Context& context, const std::string& reason, bool stop);

struct CheckpointOptions {
  uint64_t id = 0;
  bool wait = false;
  double timeout_s = 0;
};
ExitCode Checkpoint(const Context& context, const CheckpointOptions& options);

// Both work on files alone, as the user.
ExitCode VerifyCheckpoint(const Context& context, const std::string& folder);
struct ExportOptions {
  std::string from;  // a job's id, or a checkpoint's folder
  std::string to;
  bool float32 = false;
};
ExitCode Export(const Context& context, const ExportOptions& options);
ExitCode Undrain(const Context& context);

struct EstimateOptions {
  std::string source;             // model folder or job file
  std::vector<std::string> keys;  // --ranks N and the like, as KEY=VALUE
  std::vector<std::string> sets;
  double gpu_memory_gib = 0;  // 0: what this host's GPUs have
};
ExitCode EstimateModel(const Context& context, const EstimateOptions& options);
// The plan that the job would get, as a plan file.
ExitCode PrintPlan(const Context& context, const EstimateOptions& options);

ExitCode Doctor(const Context& context);
ExitCode Version(const Context& context);

}  // namespace slidedp::ctl
