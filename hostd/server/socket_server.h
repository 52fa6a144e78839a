// Accepts on both sockets, on one thread. A control connection goes to the gRPC
// server of its peer's identity, an attach connection with its first packet to
// the core.
#pragma once

#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "hostd/daemon/core.h"
#include "hostd/daemon/event_loop.h"
#include "hostd/server/identity.h"
#include "hostd/server/sockets.h"

namespace slidedp::hostd {

struct ServerConfig {
  AccessRules access;
  size_t max_connections_per_user = 64;
};

class SocketServer {
 public:
  // `loop` and `core` outlive it.
  static absl::StatusOr<std::unique_ptr<SocketServer>> Start(
      const ServerConfig& config, ListeningSocket control,
      ListeningSocket attach, EventLoop& loop, Core& core);
  virtual ~SocketServer() = default;  // Stop()
  // Closes the listeners and removes their files (unless inherited), cancels
  // what calls are left. The loop must still be running.
  virtual void Stop() = 0;
};

}  // namespace slidedp::hostd
