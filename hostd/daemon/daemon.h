// The whole daemon, from its lock to its last socket. main.cc builds the Config
// and waits for signals.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "hostd/daemon/config.h"

namespace slidedp::hostd {

// What main finds in the environment besides the Config.
struct Supervision {
  std::string notify_socket;  // NOTIFY_SOCKET
  std::string listen_pid;     // LISTEN_PID
  std::string listen_fds;     // LISTEN_FDS
};

class Daemon {
 public:
  // Takes the lock, opens the journal, recovers, listens, says READY=1.
  static absl::StatusOr<std::unique_ptr<Daemon>> Start(
      const Config& config, const Supervision& supervision);
  virtual ~Daemon() = default;
  // Begins to stop: active jobs end as FAILED. `done` is called on another
  // thread when no worker is left.
  virtual void BeginStop(std::function<void()> done) = 0;
  // After `done`, or instead of waiting for it: closes everything. What is left
  // of the workers is killed.
  virtual void Finish() = 0;
};

}  // namespace slidedp::hostd
