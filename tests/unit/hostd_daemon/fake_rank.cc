#include "tests/unit/hostd_daemon/fake_rank.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <utility>

#include "common/base/backoff.h"
#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/shm/fd_passing.h"
#include "common/shm/words.h"
#include "proto/protocol.h"

namespace slidedp::hostd {
namespace {

constexpr auto kPatience = std::chrono::minutes(1);
constexpr int64_t kPatienceNs = 60'000'000'000;

template <typename Ready>
void Await(Ready ready) {
  const int64_t deadline_ns = MonotonicNs() + kPatienceNs;
  Backoff backoff;
  while (!ready()) {
    SDP_CHECK(MonotonicNs() < deadline_ns, "the daemon does not go on");
    backoff.Pause();
  }
}

}  // namespace

FakeSession::~FakeSession() {
  Break();
  std::promise<void> done;
  loop_.Post([&] { done.set_value(); });
  done.get_future().wait();
}

void FakeSession::Send(const v1::DaemonMessage& message) {
  std::lock_guard lock(mutex_);
  if (finished_) return;
  messages_.push_back(message);
  changed_.notify_all();
}

void FakeSession::Finish(const absl::Status& status) {
  std::lock_guard lock(mutex_);
  if (finished_) return;
  // As gRPC does: the peer sees the end and its own side ends. Before the test
  // can see it, and destroy this.
  loop_.Post([this] {
    if (!std::exchange(ended_, true)) core_.OnSessionEnd(this);
  });
  finished_ = status;
  changed_.notify_all();
}

void FakeSession::Say(const v1::WorkerMessage& message) {
  loop_.Post([this, message] {
    if (!ended_) core_.OnSessionMessage(this, message);
  });
}

void FakeSession::SayHello(uint64_t job, uint32_t rank, bool peer_access,
                           uint64_t gpu_bytes) {
  v1::WorkerMessage message;
  v1::Hello* hello = message.mutable_hello();
  hello->set_job(job);
  hello->set_rank(rank);
  hello->set_protocol(kProtocolVersion);
  hello->set_pid(static_cast<uint32_t>(getpid()));
  hello->set_device(gpu_bytes > 0 ? v1::DEVICE_KIND_CUDA : v1::DEVICE_KIND_CPU);
  hello->set_device_description(gpu_bytes > 0 ? "test GPU" : "test CPU");
  hello->set_device_memory_bytes(gpu_bytes);
  hello->set_peer_access(peer_access);
  Say(message);
}

void FakeSession::Break() {
  {
    std::lock_guard lock(mutex_);
    if (!finished_) finished_ = absl::CancelledError("broken by the test");
  }
  loop_.Post([this] {
    if (!std::exchange(ended_, true)) core_.OnSessionEnd(this);
  });
}

std::optional<v1::DaemonMessage> FakeSession::Next() {
  std::unique_lock lock(mutex_);
  const bool in_time = changed_.wait_for(lock, kPatience, [this] {
    return !messages_.empty() || finished_.has_value();
  });
  SDP_CHECK(in_time, "the daemon says nothing");
  if (messages_.empty()) return std::nullopt;
  v1::DaemonMessage message = std::move(messages_.front());
  messages_.pop_front();
  return message;
}

absl::Status FakeSession::End() {
  while (Next()) {
  }
  std::lock_guard lock(mutex_);
  return *finished_;
}

FakeAttachment::FakeAttachment(EventLoop& loop, Core& core, uint32_t uid,
                               const v1::AttachRequest& request) {
  int fds[2];
  SDP_CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) == 0,
            "socketpair");
  socket_ = UniqueFd(fds[0]);
  auto connection = std::make_shared<AttachConnection>();
  connection->socket = UniqueFd(fds[1]);
  connection->uid = uid;
  loop.Post(
      [&core, connection, request] { core.OnAttach(connection, request); });
}

v1::AttachReply FakeAttachment::Receive() {
  auto message = shm::ReceiveMessage(socket_.get(), kPatienceNs);
  SDP_CHECK(message.ok(), message.status().ToString());
  v1::AttachReply reply;
  SDP_CHECK(reply.ParseFromString(message->payload), "AttachReply");
  SDP_CHECK(static_cast<size_t>(reply.segments_size()) == message->fds.size(),
            "a descriptor for each segment");
  for (int i = 0; i < reply.segments_size(); ++i) {
    const auto kind = static_cast<shm::SegmentKind>(reply.segments(i).kind());
    const bool read_only = kind == shm::SegmentKind::kParams ||
                           kind == shm::SegmentKind::kVersions;
    auto mapping = shm::Mapping::Map(
        message->fds[i].get(), reply.segments(i).bytes(),
        read_only ? shm::Access::kReadOnly : shm::Access::kReadWrite, "test");
    SDP_CHECK(mapping.ok(), mapping.status().ToString());
    segments_.emplace_back(kind, *std::move(mapping));
  }
  return reply;
}

void FakeAttachment::Send(v1::FilesMessage::Kind kind,
                          const std::vector<std::string>& names,
                          const std::vector<int>& fds,
                          const std::string& error) {
  v1::FilesMessage message;
  message.set_kind(kind);
  message.set_error(error);
  for (const std::string& name : names) message.add_names(name);
  message.set_last(true);
  absl::Status sent =
      shm::SendMessage(socket_.get(), message.SerializeAsString(), fds);
  SDP_CHECK(sent.ok(), sent.ToString());
}

v1::FilesReply FakeAttachment::Pass(v1::FilesMessage::Kind kind,
                                    const std::vector<std::string>& names,
                                    const std::vector<int>& fds) {
  Send(kind, names, fds);
  auto answer = shm::ReceiveMessage(socket_.get(), kPatienceNs);
  v1::FilesReply reply;
  if (!answer.ok()) {
    reply.set_error(std::string(answer.status().message()));
    return reply;
  }
  SDP_CHECK(reply.ParseFromString(answer->payload), "FilesReply");
  return reply;
}

const shm::Mapping& FakeAttachment::segment(shm::SegmentKind kind) const {
  for (const auto& [each, mapping] : segments_) {
    if (each == kind) return mapping;
  }
  SDP_CHECK(false, "no such segment");
}

void TrainOnNothing(const FakeAttachment& attachment,
                    const model::StateLayout& layout, const policy::Plan& plan,
                    int rank, uint64_t first, uint64_t steps, double loss_sum) {
  const policy::GradSchedule schedule = policy::MakeGradSchedule(layout, plan);
  const shm::Versions versions(
      attachment.segment(shm::SegmentKind::kVersions).data());
  const uint64_t rows = policy::ReportedRows(layout);
  const shm::Reports reports(
      attachment.segment(shm::SegmentKind::kReports).data(),
      schedule.buckets.size(), rows);
  const uint64_t chunks = schedule.chunks[rank].size();
  for (uint64_t step = first; step < first + steps; ++step) {
    for (size_t unit = 0; unit < layout.units.size(); ++unit) {
      Await([&] {
        return versions.param_version(unit).load(std::memory_order_acquire) >=
               step;
      });
    }
    shm::StepReport& report = reports.step(rank, step);
    if (rows > 0) {
      std::fill_n(reports.used_rows(rank, step), shm::RowWords(rows), 0);
    }
    report.valid_tokens = 60;
    report.begin_ns = MonotonicNs();
    report.begun.value.store(step + 1, std::memory_order_release);
    report.embedded.value.store(step + 1, std::memory_order_release);
    report.loss_sum = loss_sum;
    report.loss_ready.value.store(step + 1, std::memory_order_release);
    for (uint64_t i = 0; i < chunks; ++i) {
      const uint64_t number = step * chunks + i;
      Await([&] {
        return versions.grad_free(rank).load(std::memory_order_acquire) >=
               step * chunks + schedule.FreeBefore(rank, i + 1);
      });
      reports.square_norm(rank, schedule.chunks[rank][i].bucket) = 0;
      reports.grad_ready(rank).store(number + 1, std::memory_order_release);
    }
    report.end_ns = MonotonicNs();
    report.deliver_ns = report.compute_ns = report.reduce_ns = 1;
    report.drain_ns = report.stall_ns = 1;
    report.offload_ns = report.offload_wait_ns = 1;
    report.times_ready.value.store(step + 1, std::memory_order_release);
  }
}

}  // namespace slidedp::hostd
