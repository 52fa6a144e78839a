#include "common/shm/fd_passing.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <thread>

#include "absl/strings/str_cat.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"

namespace slidedp::shm {
namespace {

using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;

constexpr int64_t kLongNs = 60'000'000'000;

size_t OpenFiles() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                       {});
}

class FdPassingTest : public ::testing::Test {
 protected:
  FdPassingTest() {
    int raw[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, raw), 0);
    daemon_ = UniqueFd(raw[0]);
    worker_ = UniqueFd(raw[1]);
    EXPECT_EQ(pipe2(raw, O_CLOEXEC), 0);
    read_end_ = UniqueFd(raw[0]);
    write_end_ = UniqueFd(raw[1]);
  }

  UniqueFd daemon_, worker_;
  UniqueFd read_end_, write_end_;
};

TEST_F(FdPassingTest, PayloadsArriveWholeAndInOrder) {
  const std::string binary("a\0b\n", 4);
  ASSERT_THAT(SendMessage(daemon_.get(), binary, {}), IsOk());
  ASSERT_THAT(SendMessage(daemon_.get(), "x", {}), IsOk());
  EXPECT_EQ(ReceiveMessage(worker_.get(), kLongNs)->payload, binary);
  EXPECT_EQ(ReceiveMessage(worker_.get(), kLongNs)->payload, "x");
}

TEST_F(FdPassingTest, TheLongestMessageWithAllDescriptorsArrives) {
  const std::string payload(kMaxMessageBytes, 'p');
  const std::vector<int> fds(kMaxFdsPerMessage, write_end_.get());
  ASSERT_THAT(SendMessage(daemon_.get(), payload, fds), IsOk());
  const size_t before = OpenFiles();
  {
    const auto message = ReceiveMessage(worker_.get(), kLongNs);
    ASSERT_THAT(message, IsOk());
    EXPECT_EQ(message->payload, payload);
    ASSERT_EQ(message->fds.size(), kMaxFdsPerMessage);
    for (const UniqueFd& fd : message->fds) {
      ASSERT_EQ(fcntl(fd.get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
      ASSERT_EQ(write(fd.get(), "w", 1), 1);
    }
    char got[kMaxFdsPerMessage + 1];
    EXPECT_EQ(read(read_end_.get(), got, sizeof(got)),
              static_cast<ssize_t>(kMaxFdsPerMessage));
  }
  EXPECT_EQ(OpenFiles(), before);
}

TEST_F(FdPassingTest, WhatCannotBeSentIsRefusedByTheSender) {
  const std::vector<int> many(kMaxFdsPerMessage + 1, write_end_.get());
  for (const absl::Status& status :
       {SendMessage(daemon_.get(), "x", many),
        SendMessage(daemon_.get(), "", {}),
        SendMessage(daemon_.get(), std::string(kMaxMessageBytes + 1, 'x'),
                    {})}) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument));
  }
  EXPECT_THAT(SendMessage(daemon_.get(), "x", {-1}),
              StatusIs(absl::StatusCode::kFailedPrecondition));
  // Nothing of it went out.
  EXPECT_THAT(ReceiveMessage(worker_.get(), 0),
              StatusIs(absl::StatusCode::kDeadlineExceeded));
}

// Sends without the checks of SendMessage.
bool SendRaw(int socket, const std::string& payload, size_t fds, int fd) {
  const int buffer_bytes = 4 << 20;
  setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &buffer_bytes,
             sizeof(buffer_bytes));
  iovec part = {const_cast<char*>(payload.data()), payload.size()};
  std::vector<char> control(CMSG_SPACE(fds * sizeof(int)));
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (fds != 0) {
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    cmsghdr* item = CMSG_FIRSTHDR(&header);
    item->cmsg_level = SOL_SOCKET;
    item->cmsg_type = SCM_RIGHTS;
    item->cmsg_len = CMSG_LEN(fds * sizeof(int));
    const std::vector<int> values(fds, fd);
    std::memcpy(CMSG_DATA(item), values.data(), fds * sizeof(int));
  }
  return sendmsg(socket, &header, MSG_NOSIGNAL) ==
         static_cast<ssize_t>(payload.size());
}

TEST_F(FdPassingTest, ATruncatedMessageIsAnErrorAndLeaksNothing) {
  const size_t before = OpenFiles();
  ASSERT_TRUE(SendRaw(daemon_.get(), std::string(kMaxMessageBytes + 1, 'x'), 7,
                      read_end_.get()));
  EXPECT_THAT(ReceiveMessage(worker_.get(), kLongNs),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("longer than")));
  EXPECT_EQ(OpenFiles(), before);
  // The connection is still good.
  ASSERT_THAT(SendMessage(daemon_.get(), "next", {}), IsOk());
  EXPECT_EQ(ReceiveMessage(worker_.get(), kLongNs)->payload, "next");
}

TEST_F(FdPassingTest, LostDescriptorsAreAnErrorAndLeakNothing) {
  ASSERT_TRUE(SendRaw(daemon_.get(), "x", 20, read_end_.get()));
  const size_t before = OpenFiles();
  rlimit limit;
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  // Room for a few only: above the highest number in use.
  rlimit tight = limit;
  const int highest = fcntl(read_end_.get(), F_DUPFD_CLOEXEC, 0);
  ASSERT_GE(highest, 0);
  close(highest);
  tight.rlim_cur = static_cast<rlim_t>(highest) + 5;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &tight), 0);
  const auto message = ReceiveMessage(worker_.get(), kLongNs);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_THAT(message,
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("ulimit -n")));
  EXPECT_EQ(OpenFiles(), before);
}

TEST_F(FdPassingTest, UnaskedCredentialsPushOutNoDescriptor) {
  const int on = 1;
  ASSERT_EQ(setsockopt(worker_.get(), SOL_SOCKET, SO_PASSCRED, &on, sizeof(on)),
            0);
  ASSERT_THAT(SendMessage(daemon_.get(), "x",
                          std::vector<int>(kMaxFdsPerMessage, read_end_.get())),
              IsOk());
  const auto message = ReceiveMessage(worker_.get(), kLongNs);
  ASSERT_THAT(message, IsOk());
  EXPECT_EQ(message->fds.size(), kMaxFdsPerMessage);
}

TEST_F(FdPassingTest, AnEmptyPacketWithDescriptorsIsAnError) {
  const size_t before = OpenFiles();
  ASSERT_TRUE(SendRaw(daemon_.get(), "", 3, read_end_.get()));
  EXPECT_THAT(ReceiveMessage(worker_.get(), kLongNs),
              StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_EQ(OpenFiles(), before);
}

TEST_F(FdPassingTest, APeerThatLeftIsNamed) {
  ASSERT_THAT(SendMessage(daemon_.get(), "last words", {}), IsOk());
  daemon_.Reset();
  EXPECT_EQ(ReceiveMessage(worker_.get(), kLongNs)->payload, "last words");
  EXPECT_THAT(ReceiveMessage(worker_.get(), kLongNs),
              StatusIs(absl::StatusCode::kCancelled, HasSubstr("peer")));
  EXPECT_THAT(SendMessage(worker_.get(), "x", {}),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("peer")));
}

TEST_F(FdPassingTest, SilenceEndsAtTheTimeout) {
  for (int64_t timeout_ns : {int64_t{0}, int64_t{1}, int64_t{2'000'000}}) {
    EXPECT_THAT(ReceiveMessage(worker_.get(), timeout_ns),
                StatusIs(absl::StatusCode::kDeadlineExceeded));
  }
}

TEST_F(FdPassingTest, NotASocketIsAnErrorAtOnce) {
  for (int fd : {-1, 1'000'000}) {
    EXPECT_THAT(ReceiveMessage(fd, kLongNs),
                StatusIs(absl::StatusCode::kFailedPrecondition));
    EXPECT_THAT(SendMessage(fd, "x", {}),
                StatusIs(absl::StatusCode::kFailedPrecondition));
  }
}

std::atomic<int> signals_taken{0};

TEST_F(FdPassingTest, SignalsDoNotEndAReceive) {
  struct sigaction action = {};
  action.sa_handler = [](int) { signals_taken.fetch_add(1); };
  ASSERT_EQ(sigaction(SIGUSR1, &action, nullptr), 0);
  absl::StatusOr<Message> message = absl::UnknownError("not run");
  std::thread receiver(
      [&] { message = ReceiveMessage(worker_.get(), kLongNs); });
  const pthread_t thread = receiver.native_handle();
  for (int sent = 0; sent < 5; ++sent) {
    ASSERT_EQ(pthread_kill(thread, SIGUSR1), 0);
    while (signals_taken.load() <= sent) std::this_thread::yield();
  }
  ASSERT_THAT(SendMessage(daemon_.get(), "after", {}), IsOk());
  receiver.join();
  ASSERT_THAT(message, IsOk());
  EXPECT_EQ(message->payload, "after");
}

TEST(ConnectSeqpacketTest, ReachesAListener) {
  testing::TempFolder folder;
  const std::string path = folder.Sub("s");
  UniqueFd listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  ASSERT_LT(path.size(), sizeof(address.sun_path));
  std::memcpy(address.sun_path, path.data(), path.size());
  ASSERT_EQ(bind(listener.get(), reinterpret_cast<sockaddr*>(&address),
                 sizeof(address)),
            0);
  EXPECT_THAT(ConnectSeqpacket(path),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr(path)));
  ASSERT_EQ(listen(listener.get(), 1), 0);
  const auto client = ConnectSeqpacket(path);
  ASSERT_THAT(client, IsOk());
  UniqueFd server(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  ASSERT_THAT(SendMessage(server.get(), "hello", {listener.get()}), IsOk());
  EXPECT_EQ(ReceiveMessage(client->get(), kLongNs)->payload, "hello");
}

TEST(ConnectSeqpacketTest, BadPathsAreErrorsThatNameThem) {
  testing::TempFolder folder;
  EXPECT_THAT(ConnectSeqpacket(folder.Sub("none")),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("none")));
  for (const std::string& path :
       {std::string(), std::string(108, 'x'), std::string("a\0b", 3)}) {
    EXPECT_THAT(
        ConnectSeqpacket(path),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("socket path")));
  }
}

}  // namespace
}  // namespace slidedp::shm
