#include "hostd/server/sockets.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>

#include "hostd/server/connections.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"

namespace slidedp::hostd {
namespace {

using ::slidedp::testing::StatusIs;
using ::slidedp::testing::TempFolder;
using ::testing::HasSubstr;

TEST(SocketsTest, FolderMustBeOursAndClosed) {
  TempFolder folder;
  const std::string path = folder.Sub("a/b");
  EXPECT_OK(PrepareFolder(path, true));
  struct stat info;
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700);
  EXPECT_OK(PrepareFolder(path, true));
  ASSERT_EQ(chmod(path.c_str(), 0755), 0);
  EXPECT_THAT(
      PrepareFolder(path, true),
      StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("chmod 700")));
  EXPECT_OK(PrepareFolder(path, false));
  ASSERT_EQ(chmod(path.c_str(), 0777), 0);
  EXPECT_FALSE(PrepareFolder(path, false).ok());
  ASSERT_EQ(symlink(path.c_str(), folder.Sub("link").c_str()), 0);
  EXPECT_THAT(PrepareFolder(folder.Sub("link"), true),
              StatusIs(absl::StatusCode::kFailedPrecondition));
  folder.Write("file", "");
  EXPECT_FALSE(PrepareFolder(folder.Sub("file"), true).ok());
  if (geteuid() == 0) {
    ASSERT_EQ(mkdir(folder.Sub("theirs").c_str(), 0700), 0);
    ASSERT_EQ(chown(folder.Sub("theirs").c_str(), 1, 1), 0);
    EXPECT_THAT(
        PrepareFolder(folder.Sub("theirs"), true),
        StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("uid 1")));
  }
}

TEST(SocketsTest, LockIsExclusiveAndGoesWithItsHolder) {
  TempFolder folder;
  const std::string path = folder.Sub("lock");
  {
    ASSERT_OK_AND_ASSIGN(LockFile held, LockFile::Take(path));
    EXPECT_THAT(LockFile::Take(path),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr(std::to_string(getpid()))));
    LockFile moved = std::move(held);
    EXPECT_FALSE(LockFile::Take(path).ok());
  }
  EXPECT_FALSE(std::filesystem::exists(path));
  // What a killed daemon leaves is no lock.
  folder.Write("lock", "12345\n");
  EXPECT_OK(LockFile::Take(path));
}

TEST(SocketsTest, ListenReplacesASocketButNothingElse) {
  TempFolder folder;
  const std::string path = folder.Sub("s");
  { ASSERT_OK(Listen(path, SOCK_STREAM)); }
  ASSERT_OK_AND_ASSIGN(ListeningSocket again, Listen(path, SOCK_STREAM));
  struct stat info;
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0666);
  folder.Write("file", "precious");
  EXPECT_THAT(Listen(folder.Sub("file"), SOCK_STREAM),
              StatusIs(absl::StatusCode::kFailedPrecondition));
  EXPECT_EQ(testing::ReadWhole(folder.Sub("file")), "precious");
  EXPECT_FALSE(Listen(folder.Sub(std::string(200, 'x')), SOCK_STREAM).ok());
}

TEST(SocketsTest, NothingIsInheritedWithoutOurPid) {
  for (const auto& [pid, fds] :
       std::initializer_list<std::pair<std::string, std::string>>{
           {"", ""},
           {"1", "2"},
           {std::to_string(getpid()), "0"},
           {std::to_string(getpid()), "x"},
           {"x", "2"}}) {
    ASSERT_OK_AND_ASSIGN(InheritedSockets sockets, TakeInherited(pid, fds));
    EXPECT_FALSE(sockets.control.fd.valid());
    EXPECT_FALSE(sockets.attach.fd.valid());
  }
}

TEST(NotifyTest, SendsOneDatagram) {
  TempFolder folder;
  const std::string path = folder.Sub("notify");
  UniqueFd manager(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  ASSERT_EQ(bind(manager.get(), reinterpret_cast<sockaddr*>(&address),
                 sizeof(address)),
            0);
  EXPECT_OK(Notify(path, "READY=1"));
  char buffer[64];
  ssize_t got = recv(manager.get(), buffer, sizeof(buffer), MSG_DONTWAIT);
  EXPECT_EQ(std::string(buffer, got > 0 ? got : 0), "READY=1");
  EXPECT_OK(Notify("", "READY=1"));
  EXPECT_FALSE(Notify(folder.Sub("nobody"), "READY=1").ok());
}

TEST(ConnectionsTest, ClosedAndReusedDescriptorsDoNotCount) {
  Connections connections;
  int first[2], second[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, first), 0);
  EXPECT_TRUE(connections.Add(first[0], 1));
  EXPECT_FALSE(connections.Add(first[1], 1));
  EXPECT_EQ(connections.CountAlive(), 1);
  close(first[0]);
  // The lowest number is given again: another socket under the same number.
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, second), 0);
  EXPECT_EQ(connections.CountAlive(), 0);
  EXPECT_TRUE(connections.Add(second[0], 1));
  close(first[1]);
  close(second[0]);
  close(second[1]);
  EXPECT_EQ(connections.CountAlive(), 0);
}

}  // namespace
}  // namespace slidedp::hostd
