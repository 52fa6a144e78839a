#include "tests/unit/hostd_ctl/fake_daemon.h"

#include <chrono>
#include <thread>

#include "common/base/check.h"

namespace slidedp::ctl {

FakeDaemon::FakeDaemon() : socket_(folder_.Sub("d.sock")) {
  job = MakeInfo(v1::RUNNING, 3);
  grpc::ServerBuilder builder;
  builder.AddListeningPort("unix:" + socket_,
                           grpc::InsecureServerCredentials());
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
  SDP_CHECK(server_ != nullptr, "fake daemon");
}

FakeDaemon::~FakeDaemon() {
  server_->Shutdown(std::chrono::system_clock::now());
}

grpc::Status FakeDaemon::Submit(grpc::ServerContext*,
                                const v1::SubmitRequest* request,
                                v1::SubmitReply* reply) {
  std::lock_guard<std::mutex> lock(mutex);
  submitted.push_back(*request);
  if (submit_failures-- > 0) return {grpc::StatusCode::UNAVAILABLE, "restart"};
  reply->set_id(job.id());
  reply->set_state(v1::PENDING);
  reply->set_reason("waiting for memory");
  return error;
}

grpc::Status FakeDaemon::List(grpc::ServerContext*,
                              const v1::ListRequest* request,
                              v1::ListReply* reply) {
  std::lock_guard<std::mutex> lock(mutex);
  *reply->add_jobs() = job;
  if (request->ended()) *reply->add_jobs() = MakeInfo(v1::FAILED, 5);
  reply->set_draining(draining);
  reply->set_drain_reason(drain_reason);
  return error;
}

grpc::Status FakeDaemon::Get(grpc::ServerContext*,
                             const v1::GetRequest* request,
                             v1::GetReply* reply) {
  std::lock_guard<std::mutex> lock(mutex);
  if (error.ok() && request->id() != job.id()) {
    return {grpc::StatusCode::NOT_FOUND,
            "no job " + std::to_string(request->id())};
  }
  *reply = get;
  *reply->mutable_info() = job;
  return error;
}

grpc::Status FakeDaemon::Cancel(grpc::ServerContext*,
                                const v1::CancelRequest* request,
                                v1::CancelReply* reply) {
  std::lock_guard<std::mutex> lock(mutex);
  *reply->mutable_info() = job;
  return error;
}

grpc::Status FakeDaemon::Drain(grpc::ServerContext*,
                               const v1::DrainRequest* request,
                               v1::DrainReply* reply) {
  std::lock_guard<std::mutex> lock(mutex);
  draining = true;
  drain_reason = request->reason();
  reply->set_draining(true);
  reply->set_reason(drain_reason);
  return error;
}

grpc::Status FakeDaemon::Undrain(grpc::ServerContext*,
                                 const v1::UndrainRequest*,
                                 v1::DrainReply* reply) {
  std::lock_guard<std::mutex> lock(mutex);
  draining = false;
  return error;
}

grpc::Status FakeDaemon::Watch(grpc::ServerContext* context,
                               const v1::WatchRequest* request,
                               grpc::ServerWriter<v1::WatchReply>* writer) {
  std::vector<v1::WatchReply> replies;
  bool scripted = false;
  {
    std::lock_guard<std::mutex> lock(mutex);
    watched.push_back(*request);
    if (!error.ok()) return error;
    if (!watches.empty()) {
      replies = watches.front();
      watches.pop_front();
      scripted = true;
    }
  }
  for (const v1::WatchReply& reply : replies) writer->Write(reply);
  while (!scripted && !context->IsCancelled()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return grpc::Status::OK;
}

grpc::Status FakeDaemon::Logs(grpc::ServerContext*,
                              const v1::LogsRequest* request,
                              grpc::ServerWriter<v1::LogsReply>* writer) {
  std::lock_guard<std::mutex> lock(mutex);
  logs_asked.push_back(*request);
  for (const v1::LogsReply& reply : logs) writer->Write(reply);
  return error;
}

grpc::Status FakeDaemon::Version(grpc::ServerContext*,
                                 const v1::VersionRequest*,
                                 v1::VersionReply* reply) {
  std::lock_guard<std::mutex> lock(mutex);
  reply->set_version("9.8.7");
  reply->set_protocol(protocol);
  reply->set_pid(4711);
  reply->set_started_us(1'700'000'000'123'456);
  return error;
}

v1::JobInfo MakeInfo(v1::JobState state, uint64_t step) {
  v1::JobInfo info;
  info.set_id(7);
  info.set_name("tiny");
  info.set_uid(1000);
  info.set_user("ada");
  info.set_state(state);
  if (state == v1::PENDING) info.set_reason("waiting for memory");
  if (state == v1::FAILED) info.set_reason("rank 1 exited with code 1");
  info.set_step(step);
  info.set_steps(10);
  info.set_ranks(2);
  info.set_submitted_us(1'700'000'000'000'000);
  if (state != v1::PENDING) info.set_started_us(1'700'000'001'000'000);
  info.set_host_bytes(uint64_t{3} << 30);
  info.set_steps_per_second(0.5);
  info.set_tokens_per_second(512);
  info.set_last_loss(2.5);
  info.set_client_id("11111111-2222-4333-8444-555555555555");
  return info;
}

v1::WatchReply InfoReply(v1::JobState state, uint64_t step) {
  v1::WatchReply reply;
  *reply.mutable_info() = MakeInfo(state, step);
  return reply;
}

v1::WatchReply StepReply(uint64_t step, double loss) {
  v1::WatchReply reply;
  v1::StepRecord& record = *reply.mutable_step();
  record.set_step(step);
  record.set_loss(loss);
  record.set_tokens(1024);
  record.set_valid_tokens(1000);
  record.set_seconds(2);
  return reply;
}

}  // namespace slidedp::ctl
