// Where the daemon's control socket is when nobody says so. Clients and workers
// look for it by this rule; slidedpd's own default follows it.
#pragma once

#include <sys/types.h>

#include <string>

#include "absl/status/statusor.h"

namespace slidedp {

// What the rule looks at; read from the environment in main.
struct SocketSurroundings {
  uid_t uid = 0;
  std::string socket;           // SLIDEDP_SOCKET
  std::string xdg_runtime_dir;  // XDG_RUNTIME_DIR
  std::string root;             // prefix of /run and /tmp; "" outside tests
};

// SLIDEDP_SOCKET, else the first that applies:
//   /run/slidedpd/slidedpd.sock   if it exists (the system service)
//   $XDG_RUNTIME_DIR/slidedpd/slidedpd.sock
//   /tmp/slidedpd-UID/slidedpd.sock
// /tmp is anybody's: the last is refused unless its folder is the user's own or
// not there.
absl::StatusOr<std::string> DaemonSocketPath(
    const SocketSurroundings& surroundings);

}  // namespace slidedp
