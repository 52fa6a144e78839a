#include "worker/session/control_stream.h"

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"

namespace slidedp::session {

ControlStream::ControlStream(const std::string& socket, Events events)
    : events_(std::move(events)) {
  grpc::ChannelArguments arguments;
  arguments.SetUserAgentPrefix("slidedp-worker");
  stub_ = v1::Worker::NewStub(
      grpc::CreateCustomChannel(absl::StrCat("unix:", socket),
                                grpc::InsecureChannelCredentials(), arguments));
  stream_ = stub_->Session(&context_);
  reader_ = std::thread([this] { Read(); });
}

ControlStream::~ControlStream() {
  context_.TryCancel();
  reader_.join();
}

void ControlStream::Read() {
  v1::DaemonMessage message;
  while (stream_->Read(&message)) events_.on_message(message);
  grpc::Status status;
  {
    // The call has ended, so a Write under way returns.
    std::lock_guard<std::mutex> lock(write_mutex_);
    closed_ = true;
    status = stream_->Finish();
  }
  events_.on_end(
      absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                   status.error_message()));
  std::lock_guard<std::mutex> lock(end_mutex_);
  ended_ = true;
  end_changed_.notify_all();
}

bool ControlStream::Send(const v1::WorkerMessage& message) {
  std::lock_guard<std::mutex> lock(write_mutex_);
  return !closed_ && stream_->Write(message);
}

bool ControlStream::Close(int64_t timeout_ns) {
  {
    std::lock_guard<std::mutex> lock(write_mutex_);
    if (!closed_) stream_->WritesDone();
    closed_ = true;
  }
  std::unique_lock<std::mutex> lock(end_mutex_);
  return end_changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns),
                               [this] { return ended_; });
}

}  // namespace slidedp::session
