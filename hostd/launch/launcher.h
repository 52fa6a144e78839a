// Starts, signals, reaps and listens to worker processes, all on one thread.
//
// One thread because PR_SET_PDEATHSIG follows the thread that forked, and
// because a pid may be signalled only while nobody else reaps it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace slidedp::hostd {

// Which rank of which job.
struct WorkerId {
  uint64_t job = 0;
  uint32_t rank = 0;
  auto operator<=>(const WorkerId&) const = default;
};

struct LaunchRequest {
  WorkerId id;
  std::vector<std::string> argv;         // argv[0]: the binary's absolute path
  std::vector<std::string> environment;  // NAME=VALUE
  // Whom to become; a daemon that is not root, and a job of uid 0, stay what
  // they are.
  uint32_t uid = 0;
  uint32_t gid = 0;
  std::vector<uint32_t> groups;
  // Standard output and error go here, at most `log_max_bytes` of them. The
  // folder exists.
  std::string log_file;
  uint64_t log_max_bytes = 0;
};

struct Launched {
  int32_t pid = 0;
  // Field 22 of /proc/PID/stat: with the pid it names the process for good.
  uint64_t start_ticks = 0;
};

struct WorkerExit {
  int code = 0;
  int signal = 0;  // 0: it exited by itself
};
// "exited with code 3", "was killed by signal 9 (Killed)".
std::string Describe(const WorkerExit& exit);

class Launcher {
 public:
  // All are called on the launcher's thread and must not block.
  struct Events {
    std::function<void(WorkerId, const absl::StatusOr<Launched>&)> launched;
    // Once for each process launched, after its output has been stored.
    std::function<void(WorkerId, const WorkerExit&)> exited;
    // There is something new in the log.
    std::function<void(WorkerId)> output;
  };
  static absl::StatusOr<std::unique_ptr<Launcher>> Start(Events events);
  virtual ~Launcher() = default;  // Stop()

  // Any thread; answered through Events.
  virtual void Launch(LaunchRequest request) = 0;
  // Any thread. The process group of every live worker of the job, and the
  // one of a worker whose launch is still under way.
  virtual void Signal(uint64_t job, int signal) = 0;
  // Kills and reaps what is left, then ends the thread. No event after it.
  virtual void Stop() = 0;
};

// Kills a process of an earlier daemon, if it is still that process: same pid,
// same start time. Returns whether there was one.
bool KillLeftover(int32_t pid, uint64_t start_ticks);
// Start time of a process in clock ticks since boot; NotFound if it is gone.
absl::StatusOr<uint64_t> StartTicks(int32_t pid);
absl::StatusOr<std::string> BootId();

}  // namespace slidedp::hostd
