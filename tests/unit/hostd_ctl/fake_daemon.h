// A Control service with scripted answers on a socket of its own.
#pragma once

#include <grpcpp/grpcpp.h>

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "proto/control.grpc.pb.h"
#include "tests/testing/temp_folder.h"

namespace slidedp::ctl {

class FakeDaemon : public v1::Control::Service {
 public:
  FakeDaemon();
  ~FakeDaemon() override;

  const std::string& socket() const { return socket_; }

  // What the next calls answer; guarded by mutex.
  std::mutex mutex;
  grpc::Status error;  // not OK: every unary call fails so
  v1::JobInfo job;     // of Get, Cancel and List
  v1::GetReply get;
  bool draining = false;
  std::string drain_reason;
  uint32_t protocol = 1;
  // Of Submit: that many calls fail with Unavailable first.
  int submit_failures = 0;
  std::vector<v1::SubmitRequest> submitted;
  // Of Watch, one inner list for each call; the stream then ends OK.
  std::deque<std::vector<v1::WatchReply>> watches;
  std::vector<v1::WatchRequest> watched;
  // Watch calls beyond the scripted ones stay open until they are cancelled.
  std::vector<v1::LogsReply> logs;
  std::vector<v1::LogsRequest> logs_asked;

 private:
  grpc::Status Submit(grpc::ServerContext*, const v1::SubmitRequest*,
                      v1::SubmitReply*) override;
  grpc::Status List(grpc::ServerContext*, const v1::ListRequest*,
                    v1::ListReply*) override;
  grpc::Status Get(grpc::ServerContext*, const v1::GetRequest*,
                   v1::GetReply*) override;
  grpc::Status Cancel(grpc::ServerContext*, const v1::CancelRequest*,
                      v1::CancelReply*) override;
  grpc::Status Drain(grpc::ServerContext*, const v1::DrainRequest*,
                     v1::DrainReply*) override;
  grpc::Status Undrain(grpc::ServerContext*, const v1::UndrainRequest*,
                       v1::DrainReply*) override;
  grpc::Status Watch(grpc::ServerContext*, const v1::WatchRequest*,
                     grpc::ServerWriter<v1::WatchReply>*) override;
  grpc::Status Logs(grpc::ServerContext*, const v1::LogsRequest*,
                    grpc::ServerWriter<v1::LogsReply>*) override;
  grpc::Status Version(grpc::ServerContext*, const v1::VersionRequest*,
                       v1::VersionReply*) override;

  testing::TempFolder folder_;
  std::string socket_;
  std::unique_ptr<grpc::Server> server_;
};

// "job 7 is RUNNING at step 3 of 10" and the like.
v1::JobInfo MakeInfo(v1::JobState state, uint64_t step = 0);
v1::WatchReply InfoReply(v1::JobState state, uint64_t step = 0);
v1::WatchReply StepReply(uint64_t step, double loss);

}  // namespace slidedp::ctl
