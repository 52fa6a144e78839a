// What slidedpd is told at start. Parsed once, from flags and a YAML file with
// the same keys (dashes in flags, underscores in the file); flags win.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/units.h"

namespace slidedp::hostd {

struct Config {
  // Holds slidedpd.sock, attach.sock and lock.
  std::string runtime_dir;
  // Holds jobs.sqlite and logs/JOB/.
  std::string state_dir;
  // What the daemon starts for a rank.
  std::string worker_binary;
  std::string log_level = "info";
  // Threads of a job's update engine where the job spec leaves it open; 0:
  // policy chooses.
  uint64_t update_threads = 0;
  // Most that all jobs together may take of the host; 0: what the host has.
  uint64_t max_host_bytes = 0;
  // Left free for everything else when a job is admitted.
  uint64_t headroom_bytes = 256 * kMiB;
  uint64_t max_running_jobs = 1;
  uint64_t max_pending_jobs_per_user = 250;
  // Ended jobs beyond these are forgotten, oldest first, with their logs.
  uint64_t keep_ended_jobs = 1000;
  // A rank's log is cut off here.
  uint64_t log_max_bytes = 64 * kMiB;
  // How often the daemon stores its heartbeat word.
  uint64_t heartbeat_s = 1;
  // A rank that says nothing for so long is lost.
  uint64_t lease_s = 10;
  // From the start of a job to the joining of its last rank, where the daemon
  // starts the workers and where the user does.
  uint64_t join_timeout_s = 60;
  uint64_t manual_join_timeout_s = 3600;
  // From the abort of a job to SIGKILL for what is left of its workers.
  uint64_t kill_timeout_s = 8;
  // For all jobs to be gone after SIGTERM.
  uint64_t stop_timeout_s = 300;
  // Open connections of one user.
  uint64_t max_connections_per_user = 64;
  // Members may connect; empty: everybody.
  std::string user_group;
  // Members may cancel, read and drain everything.
  std::string admin_group = "slidedp-admin";

  // Not settings: what main finds in its environment.
  // NAME=VALUE pairs handed on to workers (CUDA_*, NCCL_*, OPENBLAS_*, LANG
  // and the like).
  std::vector<std::string> worker_environment;

  std::string control_socket() const { return runtime_dir + "/slidedpd.sock"; }
  std::string attach_socket() const { return runtime_dir + "/attach.sock"; }
  std::string lock_file() const { return runtime_dir + "/lock"; }
  std::string journal_file() const { return state_dir + "/jobs.sqlite"; }
  std::string log_folder(uint64_t job) const;
};

// What decides the defaults of the folders.
struct Surroundings {
  uint32_t uid = 0;
  std::string xdg_runtime_dir;  // environment, may be empty
  std::string xdg_state_home;
  std::string home;
  std::string executable;  // of this process
};
Config DefaultConfig(const Surroundings& surroundings);

struct Setting {
  std::string key;  // underscores
  std::string help;
};
const std::vector<Setting>& Settings();

// One setting as text. `source` is for messages: "--lease-s" or "FILE".
absl::Status Apply(Config& config, absl::string_view source,
                   absl::string_view key, absl::string_view value);
// A flat YAML map of settings.
absl::StatusOr<std::map<std::string, std::string>> ParseConfigFile(
    absl::string_view yaml, absl::string_view file);
// Relations between settings.
absl::Status Validate(const Config& config);

// "4096", "512MiB", "1.5 GiB".
absl::StatusOr<uint64_t> ParseBytes(absl::string_view text);

}  // namespace slidedp::hostd
