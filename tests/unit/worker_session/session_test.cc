// slidedp-worker as a process, against a daemon that this test plays: every way
// to end has its exit code, says why, and leaves nothing behind.
#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
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
#include "policy/plan.h"
#include "policy/wire.h"
#include "proto/control.grpc.pb.h"
#include "proto/protocol.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"
#include "tests/testing/tiny_model.h"

extern char** environ;

namespace slidedp::session {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kPatienceNs = 60'000'000'000;

using Stream = grpc::ServerReaderWriter<v1::DaemonMessage, v1::WorkerMessage>;
using Script = std::function<grpc::Status(Stream&)>;

// The next message that is no heartbeat; an empty one at the stream's end.
v1::WorkerMessage Next(Stream& stream) {
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
UniqueFd ListenSeqpacket(const std::string& path) {
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
    spec_.set_data(folder_.Sub("data"));
    spec_.set_output(folder_.Sub("out"));
    spec_.set_ranks(1);
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
        SLIDEDP_WORKER,        "--job",       "7",    "--rank", "0", "--socket",
        folder_.Sub("d.sock"), "--log-level", "debug"};
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
    uint64_t device_bytes = 0;
    for (const policy::NamedBytes& part :
         policy::DeviceBuffers(config_, layout_, plan_)) {
      device_bytes += part.bytes;
    }
    EXPECT_EQ(ready.ready().device_bytes(), device_bytes);
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

TEST_F(SessionTest, AWholeJobLeavesWithZeroAndATrainedModel) {
  MakeState();
  int code = RunWorker([this](Stream& stream) {
    Join(stream);
    Load(stream);
    std::unique_ptr<hostd::UpdateEngine> engine = StartEngine();
    v1::DaemonMessage message;
    message.mutable_start();
    stream.Write(message);
    EXPECT_TRUE(Next(stream).has_steps_done());
    while (engine->steps_done() < spec_.steps()) std::this_thread::yield();
    engine->Stop();
    message.mutable_open_output();
    stream.Write(message);
    auto files = ReceiveFiles(connection_.get(), v1::FilesMessage::OUTPUT);
    EXPECT_EQ(files.size(), source_->files().size());
    std::vector<int> fds;
    for (const auto& file : files) fds.push_back(file.second.get());
    EXPECT_OK(hostd::WriteParameters(*source_, *state_, fds));
    SendFilesReply(connection_.get());
    EXPECT_TRUE(Next(stream).has_output_opened());
    EXPECT_FALSE(std::filesystem::exists(folder_.Sub("out")));
    message.mutable_commit_output();
    stream.Write(message);
    v1::WorkerMessage committed = Next(stream);
    EXPECT_EQ(committed.output_committed().path(), folder_.Sub("out"));
    message.mutable_leave();
    stream.Write(message);
    EXPECT_EQ(Next(stream).what_case(), v1::WorkerMessage::WHAT_NOT_SET);
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, 0) << Log();
  EXPECT_EQ(steps_, 2);
  EXPECT_THAT(Outputs(), ::testing::ElementsAre("out"));
  ASSERT_OK_AND_ASSIGN(model::TensorSource trained,
                       model::OpenModelFolder(folder_.Sub("out")));
  EXPECT_OK(model::ValidateSource(layout_, trained));
  EXPECT_NE(testing::ReadWhole(folder_.Sub("out/model.safetensors")),
            testing::ReadWhole(folder_.Sub("model/model.safetensors")));
}

TEST_F(SessionTest, WithoutADaemonItIsGone) {
  StartWorker();
  EXPECT_EQ(WaitForWorker(), 4);
  EXPECT_THAT(Log(), HasSubstr("connection to the daemon"));
}

TEST_F(SessionTest, ADaemonThatRefusesTheRankIsAFailure) {
  int code = RunWorker([](Stream& stream) {
    Next(stream);
    return grpc::Status(grpc::StatusCode::PERMISSION_DENIED,
                        "job 7 is another user's");
  });
  EXPECT_EQ(code, 1);
  EXPECT_THAT(Log(), HasSubstr("job 7 is another user's"));
}

TEST_F(SessionTest, APlanThatIsNotTheSpecsIsRefusedAndTheNextOneTaken) {
  int code = RunWorker([this](Stream& stream) {
    Next(stream);
    const std::pair<std::function<void(v1::Propose&)>, const char*> cases[] = {
        {[](v1::Propose& p) { p.mutable_plan()->set_ranks(2); }, "ranks"},
        {[](v1::Propose& p) { p.mutable_plan()->set_version(2); }, "version"},
        {[](v1::Propose& p) { p.mutable_spec()->set_version(2); }, "version"},
        {[](v1::Propose& p) { p.mutable_plan()->set_micro_batches(1); },
         "micro_batches"},
        {[](v1::Propose& p) { p.mutable_plan()->set_sequence_length(16); },
         "sequence_length"},
        {[](v1::Propose& p) {
           p.mutable_plan()->set_update_mode(v1::UPDATE_MODE_EAGER);
         },
         "max_grad_norm"},
        {[](v1::Propose& p) {
           p.mutable_plan()->set_device(v1::DEVICE_KIND_CUDA);
         },
         "this build has no CUDA"},
        {[](v1::Propose& p) {
           p.mutable_spec()->set_device(v1::DEVICE_KIND_CUDA);
         },
         "this build has no CUDA"},
        {[](v1::Propose& p) { p.mutable_spec()->set_model_config_json("{"); },
         "config.json"},
        {[](v1::Propose& p) { p.mutable_spec()->set_steps(0); }, "steps"},
        {[](v1::Propose& p) { p.clear_plan(); }, "version"},
        {[](v1::Propose& p) { p.clear_spec(); }, "version"},
    };
    for (const auto& [change, part] : cases) {
      v1::DaemonMessage message = ProposeMessage();
      change(*message.mutable_propose());
      stream.Write(message);
      v1::WorkerMessage answer = Next(stream);
      EXPECT_TRUE(answer.has_refuse()) << part;
      EXPECT_THAT(answer.refuse().why(), HasSubstr(part));
    }
    stream.Write(ProposeMessage());
    EXPECT_TRUE(Next(stream).has_accept());
    v1::DaemonMessage message;
    message.mutable_leave();
    stream.Write(message);
    Next(stream);
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, 0) << Log();
}

TEST_F(SessionTest, MessagesOutOfTurnAreAFailure) {
  for (auto fill : std::vector<std::function<void(v1::DaemonMessage&)>>{
           [](v1::DaemonMessage& m) { m.mutable_start(); },
           [](v1::DaemonMessage& m) { m.mutable_attach(); },
           [](v1::DaemonMessage& m) { m.mutable_open_output(); },
           [](v1::DaemonMessage& m) { m.mutable_commit_output(); },
           [](v1::DaemonMessage&) {}}) {
    int code = RunWorker([&](Stream& stream) {
      Next(stream);
      v1::DaemonMessage message;
      fill(message);
      stream.Write(message);
      v1::WorkerMessage failed = Next(stream);
      EXPECT_THAT(failed.failed().why(), HasSubstr("out of turn"));
      return grpc::Status::OK;
    });
    EXPECT_EQ(code, 1);
  }
}

TEST_F(SessionTest, AnAttachReplyThatDoesNotFitIsAFailure) {
  MakeState();
  using Change = std::function<void(v1::AttachReply&, std::vector<UniqueFd>&)>;
  const std::pair<Change, const char*> cases[] = {
      {[](v1::AttachReply& r, std::vector<UniqueFd>& fds) {
         r.clear_segments();
         fds.clear();
         r.set_error("nonce was used");
       },
       "nonce was used"},
      {[](v1::AttachReply& r, std::vector<UniqueFd>& fds) {
         r.mutable_segments()->RemoveLast();
         fds.pop_back();
       },
       "did not come"},
      {[](v1::AttachReply&, std::vector<UniqueFd>& fds) { fds.pop_back(); },
       "descriptors"},
      {[](v1::AttachReply& r, std::vector<UniqueFd>&) {
         r.mutable_segments(0)->set_bytes(r.segments(0).bytes() + 4096);
       },
       "the plan says"},
      {[](v1::AttachReply& r, std::vector<UniqueFd>&) {
         r.mutable_segments(1)->set_kind(r.segments(0).kind());
       },
       "twice"},
      {[](v1::AttachReply& r, std::vector<UniqueFd>&) {
         r.mutable_segments(0)->set_kind(2);  // the state is not for workers
       },
       "not expected"},
      {[](v1::AttachReply& r, std::vector<UniqueFd>& fds) {
         // Words of the wrong segment.
         std::swap(fds[0], fds[1]);
       },
       ""},
  };
  for (const auto& [change, part] : cases) {
    int code = RunWorker([&](Stream& stream) {
      Join(stream);
      stream.Write(AttachMessage());
      UniqueFd connection = AcceptAttach();
      SendSegments(connection.get(), *state_, change);
      v1::WorkerMessage failed = Next(stream);
      EXPECT_TRUE(failed.has_failed()) << part;
      EXPECT_THAT(failed.failed().why(), HasSubstr(part));
      return grpc::Status::OK;
    });
    EXPECT_EQ(code, 1) << part;
  }
}

TEST_F(SessionTest, SegmentsOfAnotherPlanAreAFailure) {
  policy::Plan other = plan_;
  ++other.head_chunk_tokens;  // the same sizes, another hash
  ASSERT_OK_AND_ASSIGN(state_, hostd::HostState::Create("7", layout_, other));
  int code = RunWorker([this](Stream& stream) {
    Join(stream);
    stream.Write(AttachMessage());
    UniqueFd connection = AcceptAttach();
    SendSegments(connection.get(), *state_);
    EXPECT_THAT(Next(stream).failed().why(), HasSubstr("plan_hash"));
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, 1);
}

TEST_F(SessionTest, ADatasetThatChangedSinceSubmitIsAFailure) {
  MakeState();
  testing::TokenDatasetOptions other;
  other.tokens = 1088;
  testing::WriteTokenDataset(folder_.Sub("data"), other);
  int code = RunWorker([this](Stream& stream) {
    Join(stream);
    stream.Write(AttachMessage());
    UniqueFd connection = AcceptAttach();
    SendSegments(connection.get(), *state_);
    EXPECT_THAT(Next(stream).failed().why(),
                AllOf(HasSubstr("sequences = 34"), HasSubstr("was 32"),
                      HasSubstr("submit again")));
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, 1);
}

TEST_F(SessionTest, WhatTheDaemonSaysOfTheFilesIsTheReason) {
  MakeState();
  int code = RunWorker([this](Stream& stream) {
    Join(stream);
    stream.Write(AttachMessage());
    UniqueFd connection = AcceptAttach();
    SendSegments(connection.get(), *state_);
    ReceiveFiles(connection.get(), v1::FilesMessage::SOURCE);
    SendFilesReply(connection.get(), "model.norm.weight holds a NaN");
    EXPECT_THAT(Next(stream).failed().why(),
                AllOf(HasSubstr("model.norm.weight holds a NaN"),
                      HasSubstr(folder_.Sub("model"))));
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, 1);
}

// In each of these the main thread is inside a step that never ends: nobody
// applies the gradients.
TEST_F(SessionTest, AnAbortMessageEndsAStepAtOnce) {
  MakeState();
  int code = RunWorker([this](Stream& stream) {
    Join(stream);
    Load(stream);
    v1::DaemonMessage message;
    message.mutable_start();
    stream.Write(message);
    while (state_->reports().step(0, 0).begun.value.load() != 1) {
      std::this_thread::yield();
    }
    message.mutable_abort()->set_why("rank 1 was killed");
    stream.Write(message);
    EXPECT_EQ(Next(stream).what_case(), v1::WorkerMessage::WHAT_NOT_SET);
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, 3);
  EXPECT_THAT(Log(), HasSubstr("aborted: rank 1 was killed"));
}

TEST_F(SessionTest, TheAbortWordEndsAStepAtOnce) {
  MakeState();
  int code = RunWorker([this](Stream& stream) {
    Join(stream);
    Load(stream);
    v1::DaemonMessage message;
    message.mutable_start();
    stream.Write(message);
    while (state_->reports().step(0, 0).begun.value.load() != 1) {
      std::this_thread::yield();
    }
    state_->versions().abort().store(
        static_cast<uint64_t>(shm::AbortReason::kRankLost));
    EXPECT_EQ(Next(stream).what_case(), v1::WorkerMessage::WHAT_NOT_SET);
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, 3);
  EXPECT_THAT(Log(), HasSubstr("another rank was lost"));
}

TEST_F(SessionTest, ALostDaemonEndsAStepAtOnce) {
  MakeState();
  int code = RunWorker([this](Stream& stream) {
    Join(stream);
    Load(stream);
    v1::DaemonMessage message;
    message.mutable_start();
    stream.Write(message);
    while (state_->reports().step(0, 0).begun.value.load() != 1) {
      std::this_thread::yield();
    }
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "shutting down");
  });
  EXPECT_EQ(code, 4);
  EXPECT_THAT(Log(), HasSubstr("shutting down"));
}

TEST_F(SessionTest, HeartbeatsComeInTheStreamAndInTheWord) {
  MakeState();
  int code = RunWorker([this](Stream& stream) {
    Join(stream);
    Load(stream);
    v1::WorkerMessage message;
    for (int beats = 0; beats < 2;) {
      if (!stream.Read(&message)) break;
      if (!message.has_heartbeat()) continue;
      ++beats;
      EXPECT_GT(message.heartbeat().pss_bytes(), 0);
    }
    uint64_t first = state_->reports().heartbeat(0).load();
    EXPECT_GT(first, 0);
    while (state_->reports().heartbeat(0).load() == first) {
      std::this_thread::yield();
    }
    v1::DaemonMessage leave;
    leave.mutable_leave();
    stream.Write(leave);
    Next(stream);
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, 0) << Log();
}

// The three ends of a rank that has half an output on disk.
class HalfOutputTest : public SessionTest {
 protected:
  // Runs a worker to the point where its output's files are passed, then
  // `end`s it.
  int RunToOutput(const std::function<grpc::Status(Stream&)>& end) {
    MakeState();
    return RunWorker([this, end](Stream& stream) {
      Join(stream);
      Load(stream);
      v1::DaemonMessage message;
      message.mutable_open_output();
      stream.Write(message);
      ReceiveFiles(connection_.get(), v1::FilesMessage::OUTPUT);
      EXPECT_THAT(Outputs(), ::testing::ElementsAre(".out.tmp-job-7"));
      return end(stream);
    });
  }
};

TEST_F(HalfOutputTest, IsGoneAfterAnAbort) {
  int code = RunToOutput([](Stream& stream) {
    v1::DaemonMessage message;
    message.mutable_abort()->set_why("cancelled");
    stream.Write(message);
    Next(stream);
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, 3);
  EXPECT_TRUE(OutputsVanish());
}

// All that look like this worker: the sweeper does not.
TEST_F(HalfOutputTest, IsGoneAfterKill9) {
  int code = RunToOutput([this](Stream& stream) {
    std::vector<pid_t> victims;
    for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
      pid_t pid = std::atoi(entry.path().filename().c_str());
      if (pid <= 0 || pid == getpid()) continue;
      std::ifstream file(entry.path() / "cmdline");
      std::string line((std::istreambuf_iterator<char>(file)), {});
      if (line.find(folder_.Sub("d.sock")) != std::string::npos) {
        victims.push_back(pid);
      }
    }
    EXPECT_THAT(victims, ::testing::ElementsAre(pid_));
    for (pid_t pid : victims) kill(pid, SIGKILL);
    Next(stream);
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, -SIGKILL);
  EXPECT_TRUE(OutputsVanish());
}

TEST_F(HalfOutputTest, IsGoneAfterASignalToTheGroup) {
  int code = RunToOutput([this](Stream& stream) {
    kill(pid_, SIGTERM);
    Next(stream);
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, -SIGTERM);
  EXPECT_TRUE(OutputsVanish());
}

TEST_F(HalfOutputTest, IsGoneAfterAFailure) {
  int code = RunToOutput([this](Stream& stream) {
    SendFilesReply(connection_.get(), "disk full");
    EXPECT_THAT(Next(stream).failed().why(), HasSubstr("disk full"));
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, 1);
  EXPECT_TRUE(OutputsVanish());
}

// What another process is writing is not ours to remove.
TEST_F(HalfOutputTest, AnotherProcessesTemporaryFolderStays) {
  std::string other = folder_.Sub(".out.tmp-job-7");
  ASSERT_EQ(mkdir(other.c_str(), 0755), 0);
  UniqueFd lock(open(other.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  ASSERT_EQ(flock(lock.get(), LOCK_EX | LOCK_NB), 0);
  MakeState();
  int code = RunWorker([this](Stream& stream) {
    Join(stream);
    Load(stream);
    v1::DaemonMessage message;
    message.mutable_open_output();
    stream.Write(message);
    EXPECT_THAT(Next(stream).failed().why(), HasSubstr("another process"));
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, 1);
  EXPECT_THAT(Outputs(), ::testing::ElementsAre(".out.tmp-job-7"));
}

TEST_F(SessionTest, AWrongCommandLineIsUsage) {
  for (const char* args : {"", "--job 1", "--job 0 --rank 0 --socket x",
                           "--job x --rank 0 "
                           "--socket x",
                           "--job 1 --rank -1 --socket x",
                           "--job 1 --rank 0 --socket x --log-level loud",
                           "--job 1 --rank 0 --socket x --more"}) {
    std::string command =
        absl::StrCat(SLIDEDP_WORKER, " ", args, " >/dev/null 2>&1");
    int status = std::system(command.c_str());
    ASSERT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 2) << args;
  }
}

}  // namespace
}  // namespace slidedp::session
