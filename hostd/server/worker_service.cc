#include <deque>
#include <utility>

#include "hostd/server/services.h"

namespace slidedp::hostd {
namespace {

// A rank's stream as the core's WorkerSession. Lives until gRPC's OnDone has
// come through the loop. One message is read ahead: the next read starts when
// the loop has taken the last one.
class SessionReactor final
    : public grpc::ServerBidiReactor<v1::WorkerMessage, v1::DaemonMessage>,
      public WorkerSession {
 public:
  SessionReactor(const Identity& identity, EventLoop& loop, Core& core)
      : identity_(identity), loop_(loop), core_(core) {
    // A peer that never says who it is does not keep its stream.
    hello_timer_ = loop_.After(kHelloNs, [this] {
      hello_timer_ = 0;
      if (job == 0) {
        Finish(absl::DeadlineExceededError("no Hello came in time"));
      }
    });
    StartRead(&incoming_);
  }

  // WorkerSession, on the loop.
  const Identity& identity() const override { return identity_; }
  void Send(const v1::DaemonMessage& message) override {
    if (finishing_ || ended_) return;
    outgoing_.push_back(message);
    WriteNext();
  }
  void Finish(const absl::Status& status) override {
    if (finishing_) return;
    finishing_ = true;
    status_ = ToGrpc(status);
    WriteNext();
  }

  // gRPC's threads.
  void OnReadDone(bool ok) override {
    loop_.Post([this, ok] {
      if (!ok) return End();
      core_.OnSessionMessage(this, incoming_);
      incoming_.Clear();
      if (!finished_) StartRead(&incoming_);
    });
  }
  void OnWriteDone(bool ok) override {
    loop_.Post([this, ok] {
      writing_ = false;
      if (ok) {
        outgoing_.pop_front();
      } else {
        outgoing_.clear();
      }
      WriteNext();
    });
  }
  void OnDone() override {
    loop_.Post([this] {
      loop_.Cancel(hello_timer_);
      End();
      delete this;
    });
  }

 private:
  static constexpr int64_t kHelloNs = 10'000'000'000;

  void WriteNext() {
    if (writing_ || finished_) return;
    if (!outgoing_.empty()) {
      writing_ = true;
      StartWrite(&outgoing_.front());
    } else if (finishing_) {
      finished_ = true;
      ServerBidiReactor::Finish(status_);
    }
  }
  // The peer says nothing more, or is gone.
  void End() {
    if (ended_) return;
    ended_ = true;
    core_.OnSessionEnd(this);
    Finish(absl::OkStatus());
  }

  const Identity identity_;
  EventLoop& loop_;
  Core& core_;
  v1::WorkerMessage incoming_;  // gRPC's while a read is under way
  // Loop thread only.
  std::deque<v1::DaemonMessage> outgoing_;  // the first may be gRPC's
  EventLoop::TimerId hello_timer_ = 0;
  bool writing_ = false;
  bool finishing_ = false;
  bool finished_ = false;
  bool ended_ = false;
  grpc::Status status_;
};

}  // namespace

WorkerService::WorkerService(Identity identity, EventLoop& loop, Core& core)
    : identity_(std::move(identity)), loop_(loop), core_(core) {}

grpc::ServerBidiReactor<v1::WorkerMessage, v1::DaemonMessage>*
WorkerService::Session(grpc::CallbackServerContext* context) {
  return new SessionReactor(identity_, loop_, core_);
}

}  // namespace slidedp::hostd
