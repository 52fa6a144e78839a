// fork and exec of a worker with exactly the surroundings asked for.
#pragma once

#include <sys/types.h>

#include "absl/status/statusor.h"
#include "common/base/fd.h"
#include "hostd/launch/launcher.h"

namespace slidedp::hostd {

struct Spawned {
  pid_t pid = 0;
  UniqueFd pidfd;
  UniqueFd output;  // read end of standard output and error, non-blocking
};

// The child leads a new process group, has the request's uid, gid and groups,
// "/" as its folder, umask 022, default signals, no descriptor but 0 to 2, and
// dies with the calling thread. Errors up to and including exec are returned.
absl::StatusOr<Spawned> Spawn(const LaunchRequest& request);

}  // namespace slidedp::hostd
