// A core on a loop thread, with a journal in a temporary folder and a host of
// as much memory as the test says.
#pragma once

#include <unistd.h>

#include <atomic>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "hostd/daemon/core.h"
#include "hostd/daemon/job_state.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"
#include "tests/unit/hostd_daemon/fake_rank.h"
#include "tests/unit/hostd_daemon/sample_spec.h"

namespace slidedp::hostd {

class CoreTest : public ::testing::Test {
 protected:
  CoreTest() {
    config_.runtime_dir = folder_.Sub("run");
    config_.state_dir = folder_.path();
    config_.worker_binary = folder_.Sub("worker");
    config_.headroom_bytes = 0;
  }
  ~CoreTest() override { StopCore(); }

  void StartCore() {
    auto journal = Journal::Open(config_.journal_file());
    SDP_CHECK(journal.ok(), journal.status().ToString());
    journal_ = *std::move(journal);
    loop_ = std::make_unique<EventLoop>();
    CoreParts parts;
    parts.loop = loop_.get();
    parts.journal = journal_.get();
    parts.config = config_;
    parts.facts = {2, 1};
    parts.own_uid = own_uid_;
    parts.version = "test";
    parts.memory = [this]() -> absl::StatusOr<HostMemory> {
      return HostMemory{total_bytes_, "test", available_bytes_, "test"};
    };
    parts.gpus = [this] {
      ++gpu_counts_;
      return gpus_;
    };
    core_ = std::make_unique<Core>(std::move(parts));
    absl::Status status = core_->Recover();
    SDP_CHECK(status.ok(), status.ToString());
    thread_ = std::thread([this] { loop_->Run(); });
  }
  // As a killed daemon: nothing is told to anybody.
  void StopCore() {
    if (core_ == nullptr) return;
    // Runs must be released before the core may go.
    std::promise<void> done;
    loop_->Post([&] { core_->Stop([&] { done.set_value(); }); });
    done.get_future().wait();
    loop_->Stop();
    thread_.join();
    core_.reset();
    loop_.reset();
    journal_.reset();
  }

  // Runs `f` on the loop and returns what it returns.
  template <typename F>
  auto Call(F f) {
    std::promise<decltype(f())> result;
    loop_->Post([&] { result.set_value(f()); });
    return result.get_future().get();
  }

  absl::StatusOr<v1::SubmitReply> Submit(const v1::JobSpec& spec,
                                         const std::string& client_id,
                                         const Identity& who) {
    v1::SubmitRequest request;
    *request.mutable_spec() = spec;
    request.set_client_id(client_id);
    return Call([&] { return core_->Submit(who, request); });
  }
  uint64_t MustSubmit(const v1::JobSpec& spec) {
    auto reply = Submit(spec, "id-" + std::to_string(++submits_), self_);
    SDP_CHECK(reply.ok(), reply.status().ToString());
    return reply->id();
  }
  absl::StatusOr<v1::GetReply> Get(uint64_t job) {
    v1::GetRequest request;
    request.set_id(job);
    return Call([&] { return core_->Get(self_, request); });
  }
  v1::JobInfo Info(uint64_t job) {
    auto reply = Get(job);
    SDP_CHECK(reply.ok(), reply.status().ToString());
    return reply->info();
  }
  absl::Status Cancel(uint64_t job, const Identity& who) {
    v1::CancelRequest request;
    request.set_id(job);
    return Call([&] { return core_->Cancel(who, request).status(); });
  }
  void Tick(int64_t seconds_ahead) {
    Call([&] {
      core_->Tick(MonotonicNs() + seconds_ahead * 1'000'000'000);
      return 0;
    });
  }
  // Waits, through Watch, until the job has ended.
  v1::JobInfo AwaitEnd(uint64_t job) {
    FakeStream<v1::WatchReply> stream(*loop_, *core_);
    v1::WatchRequest request;
    request.set_id(job);
    loop_->Post([&] { core_->Watch(self_, request, &stream); });
    absl::Status status = stream.End();
    SDP_CHECK(status.ok(), status.ToString());
    return stream.replies().back().info();
  }
  std::unique_ptr<FakeSession> NewSession() {
    return std::make_unique<FakeSession>(*loop_, *core_, self_);
  }

  testing::TempFolder folder_;
  Config config_;
  std::atomic<uint64_t> total_bytes_ = uint64_t{64} << 30;
  std::atomic<uint64_t> available_bytes_ = uint64_t{64} << 30;
  // What counting GPUs gives; not changed while the core may count.
  absl::StatusOr<GpuFacts> gpus_ =
      absl::UnavailableError("no GPUs in this test");
  std::atomic<int> gpu_counts_ = 0;
  uint32_t own_uid_ = geteuid();
  // Who submits and joins; an administrator like the daemon's own user.
  Identity self_{geteuid(), true, "self"};
  Identity stranger_{4242, false, "stranger"};

  std::unique_ptr<Journal> journal_;
  std::unique_ptr<EventLoop> loop_;
  std::unique_ptr<Core> core_;
  std::thread thread_;
  int submits_ = 0;
};

}  // namespace slidedp::hostd
