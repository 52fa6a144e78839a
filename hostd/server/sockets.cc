#include "hostd/server/sockets.h"

#include <fcntl.h>
#include <stddef.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/base/status.h"

namespace slidedp::hostd {
namespace {

constexpr int kBacklog = 128;
constexpr int kFirstInheritedFd = 3;

absl::StatusOr<sockaddr_un> AddressOf(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": not a path for a Unix socket"));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

absl::StatusOr<int> SocketOption(int fd, int option) {
  int value = 0;
  socklen_t size = sizeof(value);
  if (getsockopt(fd, SOL_SOCKET, option, &value, &size) != 0) {
    return ErrnoStatus(errno, absl::StrCat("inherited descriptor ", fd));
  }
  return value;
}

}  // namespace

absl::Status PrepareFolder(const std::string& path, bool private_folder) {
  std::error_code error;
  std::filesystem::path parent = std::filesystem::path(path).parent_path();
  std::filesystem::create_directories(parent, error);
  if (error) {
    return ErrnoStatus(error.value(), absl::StrCat("folder ", parent.string()));
  }
  const mode_t mode = private_folder ? 0700 : 0755;
  if (mkdir(path.c_str(), mode) == 0) {
    // Whatever our umask is.
    if (chmod(path.c_str(), mode) != 0) {
      return ErrnoStatus(errno, absl::StrCat("folder ", path));
    }
  } else if (errno != EEXIST) {
    return ErrnoStatus(errno, absl::StrCat("folder ", path));
  }
  struct stat info;
  // Not through a link: in /tmp anybody may have made one.
  if (lstat(path.c_str(), &info) != 0) {
    return ErrnoStatus(errno, absl::StrCat("folder ", path));
  }
  if (!S_ISDIR(info.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, " is not a folder; remove it or name another"));
  }
  if (info.st_uid != geteuid()) {
    return absl::PermissionDeniedError(
        absl::StrCat("folder ", path, " belongs to uid ", info.st_uid,
                     ", not to uid ", geteuid(), "; name another"));
  }
  const mode_t closed = private_folder ? 077 : 022;
  if ((info.st_mode & closed) != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat("folder ", path, " is open to other users; run chmod ",
                     private_folder ? "700" : "755", " on it"));
  }
  return absl::OkStatus();
}

absl::StatusOr<LockFile> LockFile::Take(const std::string& path) {
  while (true) {
    SDP_ASSIGN_OR_RETURN(UniqueFd fd,
                         OpenFile(path, O_RDWR | O_CREAT | O_NOFOLLOW, 0600));
    if (flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) return ErrnoStatus(errno, path);
      char holder[32] = {};
      ssize_t got = pread(fd.get(), holder, sizeof(holder) - 1, 0);
      absl::string_view pid =
          absl::StripSuffix(absl::string_view(holder, got > 0 ? got : 0), "\n");
      return absl::FailedPreconditionError(absl::StrCat(
          "another slidedpd",
          pid.empty() ? "" : absl::StrCat(" (process ", pid, ")"), " holds ",
          path, "; stop it, or set another runtime_dir"));
    }
    // The holder that we waited behind may have removed the file.
    struct stat held, there;
    if (fstat(fd.get(), &held) != 0) return ErrnoStatus(errno, path);
    if (stat(path.c_str(), &there) != 0 || held.st_ino != there.st_ino ||
        held.st_dev != there.st_dev) {
      continue;
    }
    std::string pid = absl::StrCat(getpid(), "\n");
    if (ftruncate(fd.get(), 0) != 0) return ErrnoStatus(errno, path);
    SDP_RETURN_IF_ERROR(PwriteFully(fd.get(), pid.data(), pid.size(), 0, path));
    return LockFile(path, std::move(fd));
  }
}

LockFile::~LockFile() {
  if (fd_.valid()) unlink(path_.c_str());
}

absl::StatusOr<ListeningSocket> Listen(const std::string& path, int type) {
  SDP_ASSIGN_OR_RETURN(sockaddr_un address, AddressOf(path));
  ListeningSocket socket;
  socket.path = path;
  socket.fd =
      UniqueFd(::socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.fd.valid())
    return ErrnoStatus(errno, absl::StrCat(path, ": socket"));
  struct stat info;
  if (lstat(path.c_str(), &info) == 0) {
    if (!S_ISSOCK(info.st_mode)) {
      return absl::FailedPreconditionError(
          absl::StrCat(path, " is not a socket; remove it"));
    }
    if (unlink(path.c_str()) != 0) return ErrnoStatus(errno, path);
  }
  if (bind(socket.fd.get(), reinterpret_cast<sockaddr*>(&address),
           sizeof(address)) != 0) {
    return ErrnoStatus(errno, absl::StrCat(path, ": bind"));
  }
  // Before listen(): nobody can connect yet, so no umask is needed.
  if (chmod(path.c_str(), 0666) != 0) {
    return ErrnoStatus(errno, absl::StrCat(path, ": chmod"));
  }
  if (listen(socket.fd.get(), kBacklog) != 0) {
    return ErrnoStatus(errno, absl::StrCat(path, ": listen"));
  }
  return socket;
}

absl::StatusOr<InheritedSockets> TakeInherited(const std::string& listen_pid,
                                               const std::string& listen_fds) {
  InheritedSockets inherited;
  int64_t pid = 0;
  int count = 0;
  if (!absl::SimpleAtoi(listen_pid, &pid) || pid != getpid() ||
      !absl::SimpleAtoi(listen_fds, &count) || count <= 0) {
    return inherited;
  }
  for (int fd = kFirstInheritedFd; fd < kFirstInheritedFd + count; ++fd) {
    UniqueFd owned(fd);
    SDP_ASSIGN_OR_RETURN(int domain, SocketOption(fd, SO_DOMAIN));
    SDP_ASSIGN_OR_RETURN(int type, SocketOption(fd, SO_TYPE));
    SDP_ASSIGN_OR_RETURN(int listening, SocketOption(fd, SO_ACCEPTCONN));
    if (domain != AF_UNIX || listening == 0 ||
        (type != SOCK_STREAM && type != SOCK_SEQPACKET)) {
      return absl::InvalidArgumentError(
          absl::StrCat("descriptor ", fd,
                       " of the service manager is not a listening Unix "
                       "socket of type stream or seqpacket"));
    }
    ListeningSocket& socket =
        type == SOCK_STREAM ? inherited.control : inherited.attach;
    if (socket.fd.valid()) {
      return absl::InvalidArgumentError(
          "the service manager passed two sockets of one type");
    }
    sockaddr_un address = {};
    socklen_t size = sizeof(address);
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0 ||
        fcntl(fd, F_SETFD, FD_CLOEXEC) != 0 ||
        fcntl(fd, F_SETFL, O_NONBLOCK) != 0) {
      return ErrnoStatus(errno, absl::StrCat("inherited descriptor ", fd));
    }
    socket.path.assign(address.sun_path,
                       strnlen(address.sun_path, sizeof(address.sun_path)));
    socket.inherited = true;
    socket.fd = std::move(owned);
  }
  return inherited;
}

absl::Status Notify(const std::string& notify_socket,
                    const std::string& message) {
  if (notify_socket.empty()) return absl::OkStatus();
  SDP_ASSIGN_OR_RETURN(sockaddr_un address, AddressOf(notify_socket));
  if (address.sun_path[0] == '@') address.sun_path[0] = '\0';  // abstract
  UniqueFd fd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return ErrnoStatus(errno, "NOTIFY_SOCKET");
  const socklen_t size = static_cast<socklen_t>(
      offsetof(sockaddr_un, sun_path) + notify_socket.size());
  if (sendto(fd.get(), message.data(), message.size(), MSG_NOSIGNAL,
             reinterpret_cast<sockaddr*>(&address), size) < 0) {
    return ErrnoStatus(errno, absl::StrCat("NOTIFY_SOCKET ", notify_socket));
  }
  return absl::OkStatus();
}

}  // namespace slidedp::hostd
