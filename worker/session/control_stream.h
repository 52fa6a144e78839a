// The rank's gRPC stream to the daemon. Messages are read on a thread of its
// own, which also sees the stream's end at once.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "proto/control.grpc.pb.h"

namespace slidedp::session {

class ControlStream {
 public:
  // Both run on the reading thread. `on_end` comes once, last, with the
  // daemon's status.
  struct Events {
    std::function<void(const v1::DaemonMessage&)> on_message;
    std::function<void(const absl::Status&)> on_end;
  };

  // Connects lazily: a daemon that is not there shows as an end.
  ControlStream(const std::string& socket, Events events);
  // Cancels what is left of the call.
  ~ControlStream();

  // Thread-safe. False once the stream is broken; `on_end` says why.
  bool Send(const v1::WorkerMessage& message);
  // No more Send. Waits for the daemon to end its side; false if it has not
  // within `timeout_ns`.
  bool Close(int64_t timeout_ns);

 private:
  void Read();

  Events events_;
  std::unique_ptr<v1::Worker::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<
      grpc::ClientReaderWriter<v1::WorkerMessage, v1::DaemonMessage>>
      stream_;
  std::mutex write_mutex_;  // one Write at a time
  bool closed_ = false;     // guarded by write_mutex_

  std::mutex end_mutex_;
  std::condition_variable end_changed_;
  bool ended_ = false;  // guarded by end_mutex_
  std::thread reader_;
};

}  // namespace slidedp::session
