// slidedp-worker as a process, and a daemon that the test plays: its gRPC
// service, its attach socket, and the job's state.
#pragma once

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/fd.h"
#include "common/model/source.h"
#include "common/shm/fd_passing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hostd/store/host_state.h"
#include "hostd/update/engine.h"
#include "policy/gpu_memory.h"
#include "policy/plan.h"
#include "policy/wire.h"
#include "proto/control.grpc.pb.h"
#include "proto/protocol.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"
#include "tests/testing/tiny_model.h"
#include "worker/data/dataset.h"

extern char** environ;

namespace slidedp::session {

inline constexpr int64_t kPatienceNs = 60'000'000'000;

using Stream = grpc::ServerReaderWriter<v1::DaemonMessage, v1::WorkerMessage>;
using Script = std::function<grpc::Status(Stream&)>;

// The next message that is no heartbeat; an empty one at the stream's end.
inline v1::WorkerMessage Next(Stream& stream) {
  v1::WorkerMessage message;
  while (stream.Read(&message)) {
    if (!message.has_heartbeat()) return message;
  }
  return {};
}

class FakeWorkerService : public v1::Worker::Service {
 public:
  explicit FakeWorkerService(Script script) : script_(std::move(script)) {}

 private:
  grpc::Status Session(grpc::ServerContext*, Stream* stream) override {
    return script_(*stream);
  }
  Script script_;
};

// A listening SEQPACKET socket.
inline UniqueFd ListenSeqpacket(const std::string& path) {
  UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strcpy(address.sun_path, path.c_str());
  SDP_CHECK(bind(fd.get(), reinterpret_cast<sockaddr*>(&address),
                 sizeof(address)) == 0 &&
                listen(fd.get(), 4) == 0,
            "attach socket");
  return fd;
}

class SessionTest : public ::testing::Test {
 protected:
  SessionTest() : attach_listener_(ListenSeqpacket(folder_.Sub("attach"))) {
    testing::WriteTinyModel(folder_.Sub("model"), model_options_);
    testing::TokenDatasetOptions data;
    data.tokens = 1024;
    testing::WriteTokenDataset(folder_.Sub("data"), data);
    config_ = testing::TinyConfig(model_options_);
    layout_ = model::MakeStateLayout(config_);
    spec_.set_version(1);
    spec_.set_name("t");
    spec_.set_model(folder_.Sub("model"));
    v1::DataSource& source = *spec_.add_sources();
    source.set_path(folder_.Sub("data"));
    source.set_sequences(32);
    source.set_tokens(1024);
    source.set_used_tokens(1024);
    source.set_valid_tokens(32 * 31);
    source.set_crc32c(
        data::Dataset::Open(folder_.Sub("data"), 32, config_.vocab)->crc32c());
    spec_.set_output(folder_.Sub("out"));
    spec_.set_ranks(1);
    spec_.set_device(v1::DEVICE_KIND_CPU);
    spec_.set_sequence_length(32);
    spec_.set_batch_size(2);
    spec_.set_micro_batch_size(1);
    spec_.set_steps(2);
    spec_.mutable_optimizer()->set_lr(1e-3);
    spec_.set_max_grad_norm(1.0);
    spec_.set_model_config_json(
        testing::ReadWhole(folder_.Sub("model/config.json")));
    spec_.set_dataset_sequences(32);
    spec_.set_dataset_tokens(1024);
    spec_.set_dataset_valid_tokens(32 * 31);
    absl::StatusOr<policy::Problem> problem =
        policy::ProblemOf(spec_, config_, policy::DeviceKind::kCpu, true, 1);
    SDP_CHECK(problem.ok(), problem.status().ToString());
    plan_ = *policy::MakePlan(*problem);
  }

  ~SessionTest() override {
    if (pid_ > 0) {
      kill(pid_, SIGKILL);
      waitpid(pid_, nullptr, 0);
    }
  }

  void Listen(Script script) {
    server_.reset();  // removes its socket
    service_ = std::make_unique<FakeWorkerService>(std::move(script));
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix:" + folder_.Sub("d.sock"),
                             grpc::InsecureServerCredentials());
    builder.RegisterService(service_.get());
    server_ = builder.BuildAndStart();
  }

  void StartWorker() {
    std::string log = folder_.Sub("log");
    std::vector<std::string> args = {
        SLIDEDP_WORKER, "--job",    "7",
        "--rank",       "0",        "--device",
        device_,        "--socket", folder_.Sub("d.sock"),
        "--log-level",  "debug"};
    std::vector<char*> argv;
    for (std::string& arg : args) argv.push_back(arg.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 2, log.c_str(),
                                     O_WRONLY | O_CREAT | O_TRUNC, 0644);
    ASSERT_EQ(posix_spawn(&pid_, SLIDEDP_WORKER, &actions, nullptr, argv.data(),
                          environ),
              0);
    posix_spawn_file_actions_destroy(&actions);
  }

  // The exit code, or -signal.
  int WaitForWorker() {
    int status = 0;
    SDP_CHECK(waitpid(pid_, &status, 0) == pid_, "waitpid");
    pid_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  int RunWorker(Script script) {
    Listen(std::move(script));
    StartWorker();
    return WaitForWorker();
  }
  std::string Log() { return testing::ReadWhole(folder_.Sub("log")); }

  v1::DaemonMessage ProposeMessage() const {
    v1::DaemonMessage message;
    *message.mutable_propose()->mutable_spec() = spec_;
    *message.mutable_propose()->mutable_plan() = policy::ToWire(plan_);
    return message;
  }
  v1::DaemonMessage AttachMessage() const {
    v1::DaemonMessage message;
    message.mutable_attach()->set_socket(folder_.Sub("attach"));
    message.mutable_attach()->set_nonce("0123456789abcdef");
    return message;
  }

  // Accepts the attach connection and its request.
  UniqueFd AcceptAttach() {
    UniqueFd fd(
        accept4(attach_listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    absl::StatusOr<shm::Message> message =
        shm::ReceiveMessage(fd.get(), kPatienceNs);
    SDP_CHECK(message.ok(), message.status().ToString());
    v1::AttachRequest request;
    SDP_CHECK(request.ParseFromString(message->payload), "request");
    EXPECT_EQ(request.job(), 7);
    EXPECT_EQ(request.rank(), 0);
    EXPECT_EQ(request.nonce(), "0123456789abcdef");
    return fd;
  }

  // The segments of `state` that a worker gets; `change` may damage the reply.
  static void SendSegments(
      int socket, const hostd::HostState& state,
      const std::function<void(v1::AttachReply&, std::vector<UniqueFd>&)>&
          change = nullptr) {
    v1::AttachReply reply;
    std::vector<UniqueFd> fds;
    for (const shm::Segment& segment : state.segments()) {
      if (segment.kind() == shm::SegmentKind::kState) continue;
      v1::SegmentInfo& info = *reply.add_segments();
      info.set_kind(static_cast<uint32_t>(segment.kind()));
      info.set_bytes(segment.bytes());
      fds.push_back(*segment.WorkerFd());
    }
    if (change) change(reply, fds);
    std::vector<int> raw;
    for (const UniqueFd& fd : fds) raw.push_back(fd.get());
    SDP_CHECK(shm::SendMessage(socket, reply.SerializeAsString(), raw).ok(),
              "send");
  }

  // Receives the files of one kind.
  static std::vector<std::pair<std::string, UniqueFd>> ReceiveFiles(
      int socket, v1::FilesMessage::Kind kind) {
    std::vector<std::pair<std::string, UniqueFd>> files;
    for (bool last = false; !last;) {
      absl::StatusOr<shm::Message> message =
          shm::ReceiveMessage(socket, kPatienceNs);
      SDP_CHECK(message.ok(), message.status().ToString());
      v1::FilesMessage part;
      SDP_CHECK(part.ParseFromString(message->payload), "files");
      EXPECT_EQ(part.kind(), kind);
      for (int i = 0; i < part.names_size(); ++i) {
        files.emplace_back(part.names(i), std::move(message->fds[i]));
      }
      last = part.last();
    }
    return files;
  }
  static void SendFilesReply(int socket, const std::string& error = "") {
    v1::FilesReply reply;
    reply.set_error(error);
    reply.set_done(true);
    SDP_CHECK(shm::SendMessage(socket, reply.SerializeAsString(), {}).ok(),
              "send");
  }

  // Hello to Accept.
  void Join(Stream& stream) {
    v1::WorkerMessage hello = Next(stream);
    ASSERT_TRUE(hello.has_hello());
    EXPECT_EQ(hello.hello().job(), 7);
    EXPECT_EQ(hello.hello().protocol(), kProtocolVersion);
    EXPECT_EQ(hello.hello().pid(), static_cast<uint32_t>(pid_));
    EXPECT_EQ(hello.hello().device(), v1::DEVICE_KIND_CPU);
    stream.Write(ProposeMessage());
    v1::WorkerMessage answer = Next(stream);
    ASSERT_TRUE(answer.has_accept()) << answer.DebugString();
  }
  // Attach to Ready.
  void Load(Stream& stream) {
    stream.Write(AttachMessage());
    connection_ = AcceptAttach();
    SendSegments(connection_.get(), *state_);
    absl::StatusOr<model::TensorSource> source = model::TensorSource::FromFiles(
        ReceiveFiles(connection_.get(), v1::FilesMessage::SOURCE));
    ASSERT_OK(source);
    source_ = std::make_unique<model::TensorSource>(*std::move(source));
    ASSERT_OK(hostd::LoadParameters(*source_, *state_));
    SendFilesReply(connection_.get());
    v1::WorkerMessage ready = Next(stream);
    ASSERT_TRUE(ready.has_ready()) << ready.DebugString();
    EXPECT_EQ(ready.ready().dataset_sequences(), 32);
    EXPECT_EQ(ready.ready().device_bytes(),
              policy::GpuBytes(policy::DeviceBuffers(config_, layout_, plan_)));
  }
  static void Begin(Stream& stream) {
    v1::DaemonMessage message;
    message.mutable_start();
    stream.Write(message);
  }
  // To the worker, which does nothing else then.
  static grpc::Status Leave(Stream& stream) {
    v1::DaemonMessage message;
    message.mutable_leave();
    stream.Write(message);
    EXPECT_EQ(Next(stream).what_case(), v1::WorkerMessage::WHAT_NOT_SET);
    return grpc::Status::OK;
  }
  // Until the worker is inside its first step.
  void AwaitStep() const {
    while (state_->reports().step(0, 0).begun.value.load() != 1) {
      std::this_thread::yield();
    }
  }
  void MakeState() {
    absl::StatusOr<std::unique_ptr<hostd::HostState>> state =
        hostd::HostState::Create("7", layout_, plan_);
    ASSERT_OK(state);
    state_ = *std::move(state);
  }
  std::unique_ptr<hostd::UpdateEngine> StartEngine() {
    hostd::UpdateConfig update = {};
    update.lr = 1e-3;
    update.beta1 = 0.9;
    update.beta2 = 0.999;
    update.eps = 1e-8;
    update.schedule.total_steps = spec_.steps();
    update.max_grad_norm = 1;
    return hostd::UpdateEngine::Start(
        *state_, update, [this](const hostd::StepResult&) { ++steps_; },
        [](const absl::Status& status) { ADD_FAILURE() << status; });
  }

  // Names in the output's parent that are the output's or its temporary one's.
  std::vector<std::string> Outputs() const {
    std::vector<std::string> names;
    for (const auto& entry :
         std::filesystem::directory_iterator(folder_.path())) {
      std::string name = entry.path().filename();
      if (name.find("out") != std::string::npos) names.push_back(name);
    }
    return names;
  }
  // The sweeper works after the worker's death.
  bool OutputsVanish() const {
    for (int i = 0; i < 1000; ++i) {
      if (Outputs().empty()) return true;
      poll(nullptr, 0, 10);
    }
    return false;
  }

  std::string device_ = "cpu";  // --device
  testing::TempFolder folder_;
  testing::TinyModelOptions model_options_;
  model::ModelConfig config_;
  model::StateLayout layout_;
  v1::JobSpec spec_;
  policy::Plan plan_;
  std::unique_ptr<hostd::HostState> state_;
  std::unique_ptr<model::TensorSource> source_;
  UniqueFd attach_listener_, connection_;
  std::unique_ptr<FakeWorkerService> service_;
  std::unique_ptr<grpc::Server> server_;
  std::atomic<int> steps_{0};
  pid_t pid_ = 0;
};

}  // namespace slidedp::session
