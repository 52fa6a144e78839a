// Calls to slidedpd's Control service over its Unix socket. Identity is the
// connection's uid; nothing else is sent.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "hostd/ctl/interrupt.h"
#include "proto/control.grpc.pb.h"

namespace slidedp::ctl {

// After every step that a job can have.
inline constexpr uint64_t kNoSteps = uint64_t{1} << 62;

class ControlClient {
 public:
  // Does not connect yet.
  explicit ControlClient(const std::string& socket);

  // Retried with the spec's client_id while a daemon restarts: the job is the
  // same one.
  absl::StatusOr<v1::SubmitReply> Submit(const v1::SubmitRequest& request);
  absl::StatusOr<v1::ListReply> List(bool ended);
  absl::StatusOr<v1::GetReply> Get(uint64_t id);
  absl::StatusOr<v1::CancelReply> Cancel(uint64_t id);
  absl::StatusOr<v1::CheckpointReply> Checkpoint(uint64_t id);
  absl::StatusOr<v1::DrainReply> Drain(const std::string& reason, bool stop);
  absl::StatusOr<v1::DrainReply> Undrain();
  absl::StatusOr<v1::VersionReply> Version();

  // Streams. `on_message` returning false ends the call (ok). An interrupt or
  // the deadline (MonotonicNs; 0: none) ends it with CancelledError or
  // DeadlineExceededError.
  // Watch: records of steps beyond `from_step` (kNoSteps: none).
  absl::Status Watch(
      uint64_t id, uint64_t from_step, int64_t deadline_ns,
      Interrupt& interrupt,
      const std::function<bool(const v1::WatchReply&)>& on_message);
  absl::Status Logs(
      const v1::LogsRequest& request, Interrupt& interrupt,
      const std::function<bool(const v1::LogsReply&)>& on_message);
  absl::Status Trace(
      const v1::TraceRequest& request, Interrupt& interrupt,
      const std::function<bool(const v1::TraceReply&)>& on_message);

  const std::string& socket() const { return socket_; }

 private:
  // The daemon's status as an absl one; Unavailable is explained from the
  // socket's state.
  absl::Status Convert(const grpc::Status& status) const;
  template <typename Request, typename Reply, typename Call>
  absl::StatusOr<Reply> Unary(const Request& request, Call call);
  template <typename Reply>
  absl::Status Drive(grpc::ClientContext& context,
                     std::unique_ptr<grpc::ClientReader<Reply>> reader,
                     int64_t deadline_ns, Interrupt& interrupt,
                     const std::function<bool(const Reply&)>& on_message);

  std::string socket_;
  std::unique_ptr<v1::Control::Stub> stub_;
};

// Why nothing answers at `socket`: it is absent, closed to this user, or no
// daemon listens. Ok if a connection succeeds.
absl::Status ProbeSocket(const std::string& socket);

// 128 random bits as a UUID.
std::string NewClientId();

}  // namespace slidedp::ctl
