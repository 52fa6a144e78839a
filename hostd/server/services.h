// The gRPC services of one identity. Handlers hand everything to the loop; none
// touches a job itself.
#pragma once

#include <memory>

#include "hostd/daemon/core.h"
#include "hostd/daemon/event_loop.h"
#include "hostd/server/identity.h"
#include "proto/control.grpc.pb.h"

namespace slidedp::hostd {

class ControlService final : public v1::Control::CallbackService {
 public:
  ControlService(Identity identity, EventLoop& loop, Core& core);
  ControlService(const ControlService&) = delete;
  ControlService& operator=(const ControlService&) = delete;

  grpc::ServerUnaryReactor* Submit(grpc::CallbackServerContext* context,
                                   const v1::SubmitRequest* request,
                                   v1::SubmitReply* reply) override;
  grpc::ServerUnaryReactor* List(grpc::CallbackServerContext* context,
                                 const v1::ListRequest* request,
                                 v1::ListReply* reply) override;
  grpc::ServerUnaryReactor* Get(grpc::CallbackServerContext* context,
                                const v1::GetRequest* request,
                                v1::GetReply* reply) override;
  grpc::ServerUnaryReactor* Cancel(grpc::CallbackServerContext* context,
                                   const v1::CancelRequest* request,
                                   v1::CancelReply* reply) override;
  grpc::ServerUnaryReactor* Checkpoint(grpc::CallbackServerContext* context,
                                       const v1::CheckpointRequest* request,
                                       v1::CheckpointReply* reply) override;
  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context,
                                  const v1::DrainRequest* request,
                                  v1::DrainReply* reply) override;
  grpc::ServerUnaryReactor* Undrain(grpc::CallbackServerContext* context,
                                    const v1::UndrainRequest* request,
                                    v1::DrainReply* reply) override;
  grpc::ServerUnaryReactor* Version(grpc::CallbackServerContext* context,
                                    const v1::VersionRequest* request,
                                    v1::VersionReply* reply) override;
  grpc::ServerWriteReactor<v1::WatchReply>* Watch(
      grpc::CallbackServerContext* context,
      const v1::WatchRequest* request) override;
  grpc::ServerWriteReactor<v1::LogsReply>* Logs(
      grpc::CallbackServerContext* context,
      const v1::LogsRequest* request) override;
  grpc::ServerWriteReactor<v1::TraceReply>* Trace(
      grpc::CallbackServerContext* context,
      const v1::TraceRequest* request) override;

 private:
  // Runs `call` on the loop and finishes with what it returns.
  template <typename Reply, typename Call>
  grpc::ServerUnaryReactor* OnLoop(grpc::CallbackServerContext* context,
                                   Reply* reply, Call call);

  const Identity identity_;
  EventLoop& loop_;
  Core& core_;
};

class WorkerService final : public v1::Worker::CallbackService {
 public:
  WorkerService(Identity identity, EventLoop& loop, Core& core);
  WorkerService(const WorkerService&) = delete;
  WorkerService& operator=(const WorkerService&) = delete;

  grpc::ServerBidiReactor<v1::WorkerMessage, v1::DaemonMessage>* Session(
      grpc::CallbackServerContext* context) override;

 private:
  const Identity identity_;
  EventLoop& loop_;
  Core& core_;
};

grpc::Status ToGrpc(const absl::Status& status);

}  // namespace slidedp::hostd
