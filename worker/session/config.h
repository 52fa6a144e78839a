// What one worker process is told at start.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace slidedp::session {

enum class DeviceChoice {
  kAuto,  // a GPU if this build has CUDA and one is visible
  kCpu,
  kCuda,
};

struct Config {
  uint64_t job = 0;
  uint32_t rank = 0;
  // Fixed before the daemon is asked: Hello says what the device can do. Who
  // starts the process knows the job.
  DeviceChoice device = DeviceChoice::kAuto;
  std::string socket;  // the daemon's control socket
  std::string log_level = "info";
};

// Exit codes of slidedp-worker: what the daemon, or a user who started it by
// hand, sees.
enum ExitCode : int {
  kLeft = 0,        // told to leave, all done
  kFailed = 1,      // this rank failed; the log and the daemon know why
  kUsage = 2,       // the command line
  kAborted = 3,     // the daemon aborted the job
  kDaemonGone = 4,  // the connection to the daemon ended
};

}  // namespace slidedp::session
