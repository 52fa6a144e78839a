// Removes a half-written output folder when the worker dies, however it dies.
//
// A process of its own, forked before the worker starts any thread, in a
// session of its own so that a signal to the worker's group does not reach it.
// It holds nothing but the read end of a pipe; the end of the pipe is the
// worker's death. Then it removes the folder it was told of, unless somebody
// holds its lock (OutputFolder does while it lives), and exits.
#pragma once

#include <sys/types.h>

#include <string>

#include "absl/status/statusor.h"
#include "common/base/fd.h"

namespace slidedp::session {

class Sweeper {
 public:
  // Forks: call it before any thread of ours exists. The child writes its name
  // over `argv`, so that it is not taken for a worker.
  static absl::StatusOr<Sweeper> Start(int argc, char** argv);
  Sweeper(Sweeper&& other) noexcept;
  Sweeper& operator=(Sweeper&&) = delete;
  // Closes the pipe and waits for the process. What it was told of is gone by
  // then, or was renamed into place.
  ~Sweeper();

  // Before the folder is made.
  absl::Status Watch(const std::string& temporary_folder);
  // The folder is not ours after all.
  absl::Status Forget();

 private:
  absl::Status Tell(const std::string& folder);
  Sweeper(pid_t pid, UniqueFd pipe) : pid_(pid), pipe_(std::move(pipe)) {}

  pid_t pid_;
  UniqueFd pipe_;
};

}  // namespace slidedp::session
