// Where the daemon's socket is when nobody says so; the daemon has the same
// rule for where it makes it.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "hostd/ctl/environment.h"

namespace slidedp::ctl {

// `flag` (--socket), else SLIDEDP_SOCKET, else the first that applies:
//   /run/slidedpd/slidedpd.sock   if it exists (the system service)
//   $XDG_RUNTIME_DIR/slidedpd/slidedpd.sock
//   /tmp/slidedpd-UID/slidedpd.sock
// /tmp is anybody's: the last is refused unless its folder is the user's own.
absl::StatusOr<std::string> SocketPath(const std::string& flag,
                                       const Environment& environment);

}  // namespace slidedp::ctl
