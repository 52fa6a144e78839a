// The daemon's side of one worker's session: the gRPC stream, or a test.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "hostd/server/identity.h"
#include "proto/control.pb.h"

namespace slidedp::hostd {

// Loop thread only. Whoever implements it calls Core::OnSessionMessage for each
// message and Core::OnSessionEnd once, after which the core holds no pointer to
// it any more.
class WorkerSession {
 public:
  virtual ~WorkerSession() = default;
  virtual const Identity& identity() const = 0;
  // Queues a message; dropped once the session is finished or broken.
  virtual void Send(const v1::DaemonMessage& message) = 0;
  // Ends the stream after what is queued. Only the first call counts.
  virtual void Finish(const absl::Status& status) = 0;

  // Written by the core: which rank this is, once it has said Hello.
  uint64_t job = 0;
  uint32_t rank = 0;
};

// Messages to a client, one at a time. Loop thread only.
template <typename Reply>
class ReplyStream {
 public:
  virtual ~ReplyStream() = default;
  // Then not again before Core::StreamReady.
  virtual void Write(const Reply& reply) = 0;
  virtual void Finish(const absl::Status& status) = 0;
};

}  // namespace slidedp::hostd
