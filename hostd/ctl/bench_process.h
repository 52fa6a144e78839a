// Processes that a benchmark starts: a private daemon, the reference.
#pragma once

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "hostd/ctl/interrupt.h"

namespace slidedp::ctl {

// A child in a process group of its own (the terminal's Ctrl-C reaches us, not
// it), which gets SIGTERM when the calling thread ends. Ended and reaped on
// destruction.
class ChildProcess {
 public:
  // Standard output and error go to `log_file`. NotFound if argv[0] is no
  // program.
  static absl::StatusOr<ChildProcess> Start(
      const std::vector<std::string>& argv, const std::string& log_file);
  ChildProcess(ChildProcess&& other) noexcept : pid_(other.pid_) {
    other.pid_ = 0;
  }
  ChildProcess& operator=(ChildProcess&&) = delete;
  ~ChildProcess() { End(); }

  // The wait status if it has ended.
  std::optional<int> Poll();
  // Its wait status; CancelledError, once it has been ended, if `interrupt` is
  // raised first.
  absl::StatusOr<int> Wait(Interrupt& interrupt);
  // SIGTERM, after a minute SIGKILL.
  void End();

 private:
  explicit ChildProcess(pid_t pid) : pid_(pid) {}
  pid_t pid_ = 0;  // 0: none, or reaped
  int status_ = 0;
};

// slidedpd with folders below `folder`, listening at folder/run/slidedpd.sock.
// Its log is in the message if it does not come up.
absl::StatusOr<std::unique_ptr<ChildProcess>> StartPrivateDaemon(
    const std::string& program, const std::string& folder,
    Interrupt& interrupt);
std::string PrivateSocket(const std::string& folder);

// The last lines of a log, for messages; empty if there is none.
std::string LogTail(const std::string& file);

}  // namespace slidedp::ctl
