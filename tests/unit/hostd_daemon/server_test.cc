// Real sockets, gRPC and, as root, several users.
#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "common/shm/fd_passing.h"
#include "hostd/server/socket_server.h"
#include "hostd/server/sockets.h"
#include "proto/control.grpc.pb.h"
#include "proto/protocol.h"
#include "tests/unit/hostd_daemon/core_fixture.h"

namespace slidedp::hostd {
namespace {

using ::slidedp::testing::SampleSpec;
using ::testing::HasSubstr;

class ServerTest : public CoreTest {
 protected:
  void SetUp() override {
    // Other users must reach the sockets.
    ASSERT_EQ(chmod(folder_.path().c_str(), 0755), 0);
    StartCore();
    ServerConfig config;
    config.access = {geteuid(), "", ""};
    config.max_connections_per_user = 8;
    ASSERT_OK_AND_ASSIGN(ListeningSocket control,
                         Listen(folder_.Sub("c.sock"), SOCK_STREAM));
    ASSERT_OK_AND_ASSIGN(ListeningSocket attach,
                         Listen(folder_.Sub("a.sock"), SOCK_SEQPACKET));
    ASSERT_OK_AND_ASSIGN(
        server_, SocketServer::Start(config, std::move(control),
                                     std::move(attach), *loop_, *core_));
  }
  void TearDown() override {
    server_->Stop();
    EXPECT_FALSE(std::filesystem::exists(folder_.Sub("c.sock")));
    EXPECT_FALSE(std::filesystem::exists(folder_.Sub("a.sock")));
  }

  std::shared_ptr<grpc::Channel> NewChannel() {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel("unix:" + folder_.Sub("c.sock"),
                                     grpc::InsecureChannelCredentials(),
                                     arguments);
  }
  UniqueFd RawConnection(const std::string& name, int type) {
    UniqueFd fd(socket(AF_UNIX, type | SOCK_CLOEXEC, 0));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    folder_.Sub(name).copy(address.sun_path, sizeof(address.sun_path) - 1);
    SDP_CHECK(connect(fd.get(), reinterpret_cast<sockaddr*>(&address),
                      sizeof(address)) == 0,
              "connect");
    return fd;
  }
  // Whether the server has closed its end; waits for it.
  static bool AwaitClosed(int fd) {
    char byte;
    return recv(fd, &byte, 1, 0) <= 0;
  }

  std::unique_ptr<SocketServer> server_;
};

TEST_F(ServerTest, CallsAndStreamsGoThroughTheLoop) {
  auto channel = NewChannel();
  auto stub = v1::Control::NewStub(channel);
  {
    grpc::ClientContext context;
    v1::VersionReply reply;
    ASSERT_TRUE(stub->Version(&context, {}, &reply).ok());
    EXPECT_EQ(reply.protocol(), kProtocolVersion);
    EXPECT_EQ(reply.pid(), static_cast<uint32_t>(getpid()));
  }
  v1::SubmitRequest submit;
  *submit.mutable_spec() = SampleSpec();
  submit.set_client_id("abc");
  v1::SubmitReply submitted;
  {
    grpc::ClientContext context;
    ASSERT_TRUE(stub->Submit(&context, submit, &submitted).ok());
  }
  EXPECT_EQ(Info(submitted.id()).uid(), geteuid());
  v1::WatchRequest watch;
  watch.set_id(submitted.id());
  grpc::ClientContext watch_context;
  auto reader = stub->Watch(&watch_context, watch);
  v1::WatchReply seen;
  ASSERT_TRUE(reader->Read(&seen));
  EXPECT_EQ(seen.info().state(), v1::CONFIGURING);
  {
    grpc::ClientContext context;
    v1::CancelRequest cancel;
    cancel.set_id(submitted.id());
    v1::CancelReply reply;
    ASSERT_TRUE(stub->Cancel(&context, cancel, &reply).ok());
  }
  while (reader->Read(&seen)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(seen.info().state(), v1::CANCELLED);
  {
    grpc::ClientContext context;
    v1::GetRequest get;
    get.set_id(12345);
    v1::GetReply reply;
    grpc::Status status = stub->Get(&context, get, &reply);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
    EXPECT_THAT(status.error_message(), HasSubstr("12345"));
  }
}

TEST_F(ServerTest, ClientThatLeavesAStreamIsForgotten) {
  const uint64_t job = MustSubmit(SampleSpec());
  auto stub = v1::Control::NewStub(NewChannel());
  for (int i = 0; i < 20; ++i) {
    grpc::ClientContext context;
    v1::WatchRequest watch;
    watch.set_id(job);
    auto reader = stub->Watch(&context, watch);
    v1::WatchReply seen;
    ASSERT_TRUE(reader->Read(&seen));
    context.TryCancel();
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::CANCELLED);
  }
  EXPECT_EQ(Info(job).state(), v1::CONFIGURING);
}

TEST_F(ServerTest, SessionCarriesBothWaysAndItsEndIsSeen) {
  v1::JobSpec spec = SampleSpec();
  spec.set_ranks(2);
  const uint64_t job = MustSubmit(spec);
  auto stub = v1::Worker::NewStub(NewChannel());
  grpc::ClientContext contexts[2];
  std::unique_ptr<
      grpc::ClientReaderWriter<v1::WorkerMessage, v1::DaemonMessage>>
      streams[2];
  v1::DaemonMessage message;
  for (uint32_t rank : {0u, 1u}) {
    streams[rank] = stub->Session(&contexts[rank]);
    v1::WorkerMessage hello;
    hello.mutable_hello()->set_job(job);
    hello.mutable_hello()->set_rank(rank);
    hello.mutable_hello()->set_protocol(kProtocolVersion);
    hello.mutable_hello()->set_device(v1::DEVICE_KIND_CPU);
    hello.mutable_hello()->set_peer_access(true);
    ASSERT_TRUE(streams[rank]->Write(hello));
  }
  for (auto& stream : streams) {
    ASSERT_TRUE(stream->Read(&message));
    EXPECT_EQ(message.propose().spec().name(), "sample");
  }
  contexts[1].TryCancel();
  ASSERT_TRUE(streams[0]->Read(&message));
  EXPECT_THAT(message.abort().why(), HasSubstr("rank 1 broke its session"));
  EXPECT_FALSE(streams[0]->Read(&message));
  EXPECT_EQ(streams[0]->Finish().error_code(), grpc::StatusCode::ABORTED);
  EXPECT_FALSE(streams[1]->Read(&message));
  (void)streams[1]->Finish();
  EXPECT_EQ(AwaitEnd(job).state(), v1::FAILED);
}

TEST_F(ServerTest, MessageBeyondTheLimitIsRefused) {
  auto stub = v1::Control::NewStub(NewChannel());
  v1::SubmitRequest submit;
  submit.mutable_spec()->set_name(std::string(5 << 20, 'x'));
  grpc::ClientContext context;
  v1::SubmitReply reply;
  EXPECT_EQ(stub->Submit(&context, submit, &reply).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST_F(ServerTest, SilentAndGarbledConnectionsAreBounded) {
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 8; ++i) {
    silent.push_back(RawConnection("c.sock", SOCK_STREAM));
  }
  UniqueFd beyond = RawConnection("c.sock", SOCK_STREAM);
  EXPECT_TRUE(AwaitClosed(beyond.get()));
  // A garbled one is closed by gRPC and makes room.
  const std::string junk(4096, '\xff');
  for (UniqueFd& fd : silent) {
    (void)!send(fd.get(), junk.data(), junk.size(), MSG_NOSIGNAL);
  }
  for (UniqueFd& fd : silent) {
    while (!AwaitClosed(fd.get())) {
    }
  }
  auto stub = v1::Control::NewStub(NewChannel());
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  v1::VersionReply reply;
  EXPECT_TRUE(stub->Version(&context, {}, &reply).ok());
}

TEST_F(ServerTest, AttachSocketAnswersStrangersAlike) {
  v1::AttachRequest request;
  request.set_job(1);
  request.set_nonce(std::string(16, 'x'));
  UniqueFd good = RawConnection("a.sock", SOCK_SEQPACKET);
  ASSERT_OK(shm::SendMessage(good.get(), request.SerializeAsString(), {}));
  ASSERT_OK_AND_ASSIGN(shm::Message answer,
                       shm::ReceiveMessage(good.get(), 60'000'000'000));
  v1::AttachReply reply;
  ASSERT_TRUE(reply.ParseFromString(answer.payload));
  EXPECT_FALSE(reply.error().empty());
  EXPECT_TRUE(answer.fds.empty());

  UniqueFd garbled = RawConnection("a.sock", SOCK_SEQPACKET);
  ASSERT_OK(shm::SendMessage(garbled.get(), "\xff\xff\xff", {}));
  EXPECT_TRUE(AwaitClosed(garbled.get()));
  // Descriptors come only after the daemon's.
  UniqueFd pushy = RawConnection("a.sock", SOCK_SEQPACKET);
  ASSERT_OK(shm::SendMessage(pushy.get(), request.SerializeAsString(), {0, 1}));
  EXPECT_TRUE(AwaitClosed(pushy.get()));
  std::vector<UniqueFd> silent;
  for (int i = 0; i < 8; ++i) {
    silent.push_back(RawConnection("a.sock", SOCK_SEQPACKET));
  }
  UniqueFd beyond = RawConnection("a.sock", SOCK_SEQPACKET);
  EXPECT_TRUE(AwaitClosed(beyond.get()));
}

// What a client of another user gets: 0 if the daemon knows it as `uid` and
// lets it do what a user may; else what went wrong first.
int RunAsUser(uint32_t uid, const std::string& socket, uint64_t others_job) {
  if (setresgid(uid, uid, uid) != 0 || setresuid(uid, uid, uid) != 0) return 1;
  auto stub = v1::Control::NewStub(grpc::CreateChannel(
      "unix:" + socket, grpc::InsecureChannelCredentials()));
  v1::SubmitRequest submit;
  *submit.mutable_spec() = SampleSpec();
  submit.set_client_id("mine");
  v1::SubmitReply submitted;
  grpc::ClientContext c1;
  if (!stub->Submit(&c1, submit, &submitted).ok()) return 2;
  grpc::ClientContext c2;
  v1::GetRequest get;
  get.set_id(submitted.id());
  v1::GetReply got;
  if (!stub->Get(&c2, get, &got).ok() || got.info().uid() != uid) return 3;
  grpc::ClientContext c3;
  get.set_id(others_job);
  if (stub->Get(&c3, get, &got).error_code() !=
      grpc::StatusCode::PERMISSION_DENIED) {
    return 4;
  }
  grpc::ClientContext c4;
  v1::CancelRequest cancel;
  cancel.set_id(others_job);
  v1::CancelReply cancelled;
  if (stub->Cancel(&c4, cancel, &cancelled).error_code() !=
      grpc::StatusCode::PERMISSION_DENIED) {
    return 5;
  }
  grpc::ClientContext c5;
  v1::DrainReply drained;
  if (stub->Drain(&c5, {}, &drained).error_code() !=
      grpc::StatusCode::PERMISSION_DENIED) {
    return 6;
  }
  grpc::ClientContext c6;
  cancel.set_id(submitted.id());
  return stub->Cancel(&c6, cancel, &cancelled).ok() ? 0 : 7;
}

// The children exec this binary again: gRPC does not survive a fork.
TEST_F(ServerTest, EveryUserIsWhoTheKernelSays) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root";
  const uint64_t roots = MustSubmit(SampleSpec());
  // daemon, bin; nobody is refused, as whom every unmapped uid appears.
  const std::pair<uint32_t, int> users[] = {{1, 0}, {2, 0}, {65534, 2}};
  for (const auto& [uid, expected] : users) {
    const std::string user = std::to_string(uid);
    const std::string job = std::to_string(roots);
    const std::string socket = folder_.Sub("c.sock");
    pid_t child = fork();
    if (child == 0) {
      execl("/proc/self/exe", "server_test", "--as-user", user.c_str(),
            socket.c_str(), job.c_str(), nullptr);
      _exit(99);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), expected) << "uid " << uid;
  }
  EXPECT_EQ(Info(roots).state(), v1::CONFIGURING);
}

}  // namespace

int RunAsUserMain(char** argv) {
  return RunAsUser(static_cast<uint32_t>(std::stoul(argv[2])), argv[3],
                   std::stoull(argv[4]));
}

}  // namespace slidedp::hostd

int main(int argc, char** argv) {
  if (argc == 5 && std::string(argv[1]) == "--as-user") {
    return slidedp::hostd::RunAsUserMain(argv);
  }
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
