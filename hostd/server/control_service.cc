#include <utility>

#include "absl/status/statusor.h"
#include "hostd/server/services.h"

namespace slidedp::hostd {
namespace {

// A server stream as the core's ReplyStream. Lives until gRPC's OnDone has come
// through the loop.
template <typename Reply>
class StreamReactor final : public grpc::ServerWriteReactor<Reply>,
                            public ReplyStream<Reply> {
 public:
  StreamReactor(EventLoop& loop, Core& core) : loop_(loop), core_(core) {}

  // ReplyStream, on the loop.
  void Write(const Reply& reply) override {
    if (finished_) return;
    writing_ = true;
    reply_ = reply;
    this->StartWrite(&reply_);
  }
  void Finish(const absl::Status& status) override {
    if (finished_) return;
    finished_ = true;
    status_ = ToGrpc(status);
    if (!writing_) grpc::ServerWriteReactor<Reply>::Finish(status_);
  }

  // gRPC's threads.
  void OnWriteDone(bool ok) override {
    loop_.Post([this, ok] {
      writing_ = false;
      if (finished_) {
        grpc::ServerWriteReactor<Reply>::Finish(status_);
      } else if (ok) {
        core_.StreamReady(Key());
      } else {
        Finish(absl::CancelledError("the client left"));
      }
    });
  }
  void OnCancel() override {
    loop_.Post([this] { Finish(absl::CancelledError("the client left")); });
  }
  void OnDone() override {
    loop_.Post([this] {
      core_.StreamGone(Key());
      delete this;
    });
  }

 private:
  void* Key() { return static_cast<ReplyStream<Reply>*>(this); }

  EventLoop& loop_;
  Core& core_;
  // Loop thread only.
  Reply reply_;  // while it is being written
  bool writing_ = false;
  bool finished_ = false;
  grpc::Status status_;
};

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()),
                      std::string(status.message()));
}

ControlService::ControlService(Identity identity, EventLoop& loop, Core& core)
    : identity_(std::move(identity)), loop_(loop), core_(core) {}

template <typename Reply, typename Call>
grpc::ServerUnaryReactor* ControlService::OnLoop(
    grpc::CallbackServerContext* context, Reply* reply, Call call) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  loop_.Post([reactor, reply, call = std::move(call)] {
    absl::StatusOr<Reply> answer = call();
    if (answer.ok()) *reply = *std::move(answer);
    reactor->Finish(ToGrpc(answer.status()));
  });
  return reactor;
}

grpc::ServerUnaryReactor* ControlService::Submit(
    grpc::CallbackServerContext* context, const v1::SubmitRequest* request,
    v1::SubmitReply* reply) {
  return OnLoop(context, reply,
                [this, request] { return core_.Submit(identity_, *request); });
}

grpc::ServerUnaryReactor* ControlService::List(
    grpc::CallbackServerContext* context, const v1::ListRequest* request,
    v1::ListReply* reply) {
  return OnLoop(context, reply,
                [this, request] { return core_.List(identity_, *request); });
}

grpc::ServerUnaryReactor* ControlService::Get(
    grpc::CallbackServerContext* context, const v1::GetRequest* request,
    v1::GetReply* reply) {
  return OnLoop(context, reply,
                [this, request] { return core_.Get(identity_, *request); });
}

grpc::ServerUnaryReactor* ControlService::Cancel(
    grpc::CallbackServerContext* context, const v1::CancelRequest* request,
    v1::CancelReply* reply) {
  return OnLoop(context, reply,
                [this, request] { return core_.Cancel(identity_, *request); });
}

grpc::ServerUnaryReactor* ControlService::Checkpoint(
    grpc::CallbackServerContext* context, const v1::CheckpointRequest* request,
    v1::CheckpointReply* reply) {
  return OnLoop(context, reply, [this, request] {
    return core_.Checkpoint(identity_, *request);
  });
}

grpc::ServerUnaryReactor* ControlService::Drain(
    grpc::CallbackServerContext* context, const v1::DrainRequest* request,
    v1::DrainReply* reply) {
  return OnLoop(context, reply,
                [this, request] { return core_.Drain(identity_, *request); });
}

grpc::ServerUnaryReactor* ControlService::Undrain(
    grpc::CallbackServerContext* context, const v1::UndrainRequest* request,
    v1::DrainReply* reply) {
  return OnLoop(context, reply, [this] { return core_.Undrain(identity_); });
}

grpc::ServerUnaryReactor* ControlService::Version(
    grpc::CallbackServerContext* context, const v1::VersionRequest* request,
    v1::VersionReply* reply) {
  return OnLoop(context, reply, [this]() -> absl::StatusOr<v1::VersionReply> {
    return core_.Version();
  });
}

grpc::ServerWriteReactor<v1::WatchReply>* ControlService::Watch(
    grpc::CallbackServerContext* context, const v1::WatchRequest* request) {
  auto* reactor = new StreamReactor<v1::WatchReply>(loop_, core_);
  loop_.Post([this, reactor, request = *request] {
    core_.Watch(identity_, request, reactor);
  });
  return reactor;
}

grpc::ServerWriteReactor<v1::LogsReply>* ControlService::Logs(
    grpc::CallbackServerContext* context, const v1::LogsRequest* request) {
  auto* reactor = new StreamReactor<v1::LogsReply>(loop_, core_);
  loop_.Post([this, reactor, request = *request] {
    core_.Logs(identity_, request, reactor);
  });
  return reactor;
}

grpc::ServerWriteReactor<v1::TraceReply>* ControlService::Trace(
    grpc::CallbackServerContext* context, const v1::TraceRequest* request) {
  auto* reactor = new StreamReactor<v1::TraceReply>(loop_, core_);
  loop_.Post([this, reactor, request = *request] {
    core_.Trace(identity_, request, reactor);
  });
  return reactor;
}

}  // namespace slidedp::hostd
