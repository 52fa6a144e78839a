#include "common/shm/fd_passing.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "common/base/clock.h"
#include "common/base/status.h"

namespace slidedp::shm {
namespace {

constexpr size_t kFdSpace = CMSG_SPACE(kMaxFdsPerMessage * sizeof(int));
// Sent along unasked if the socket has SO_PASSCRED; must not push out fds.
constexpr size_t kCredentialSpace = CMSG_SPACE(sizeof(ucred));

constexpr absl::string_view kPeerLeft =
    "the peer closed its side of the socket";

// Waits until the socket has one of `events` or `deadline_ns` is past. A peer
// that left counts as ready: the call that follows says so.
absl::Status WaitFor(int socket, short events, int64_t deadline_ns,
                     absl::string_view what) {
  if (socket < 0) return ErrnoStatus(EBADF, what);  // poll would ignore it
  pollfd entry = {socket, events, 0};
  while (true) {
    const int64_t left = std::max<int64_t>(deadline_ns - MonotonicNs(), 0);
    const timespec timeout = {static_cast<time_t>(left / 1'000'000'000),
                              static_cast<long>(left % 1'000'000'000)};
    const int ready = ppoll(&entry, 1, &timeout, nullptr);
    if (ready > 0) {
      if ((entry.revents & POLLNVAL) != 0) return ErrnoStatus(EBADF, what);
      return absl::OkStatus();
    }
    if (ready == 0) {
      return absl::DeadlineExceededError(
          absl::StrCat(what, ": the peer did nothing in time"));
    }
    if (errno != EINTR) return ErrnoStatus(errno, absl::StrCat(what, ": poll"));
  }
}

absl::Status SendError(int error_number) {
  if (error_number == EPIPE || error_number == ECONNRESET) {
    return absl::UnavailableError(absl::StrCat("send: ", kPeerLeft));
  }
  return ErrnoStatus(error_number, "send");
}

// Takes over every descriptor of the packet, so that none leaks whatever is
// wrong with it.
std::vector<UniqueFd> TakeFds(msghdr* header) {
  std::vector<UniqueFd> fds;
  for (cmsghdr* item = CMSG_FIRSTHDR(header); item != nullptr;
       item = CMSG_NXTHDR(header, item)) {
    if (item->cmsg_level != SOL_SOCKET || item->cmsg_type != SCM_RIGHTS) {
      continue;
    }
    const size_t count = (item->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(item) + i * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  }
  return fds;
}

int64_t DeadlineAfter(int64_t timeout_ns) {
  const int64_t now = MonotonicNs();
  return timeout_ns > INT64_MAX - now ? INT64_MAX : now + timeout_ns;
}

}  // namespace

absl::Status SendMessage(int socket, absl::string_view payload,
                         const std::vector<int>& fds) {
  // An empty packet reads like the end of the connection.
  if (payload.empty() || payload.size() > kMaxMessageBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("send: a message has 1 to ", kMaxMessageBytes,
                     " bytes, not ", payload.size()));
  }
  if (fds.size() > kMaxFdsPerMessage) {
    return absl::InvalidArgumentError(
        absl::StrCat("send: a message carries at most ", kMaxFdsPerMessage,
                     " descriptors, not ", fds.size()));
  }
  iovec part = {const_cast<char*>(payload.data()), payload.size()};
  alignas(cmsghdr) char control[kFdSpace] = {};
  msghdr header = {};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  if (!fds.empty()) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* item = CMSG_FIRSTHDR(&header);
    item->cmsg_level = SOL_SOCKET;
    item->cmsg_type = SCM_RIGHTS;
    item->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(item), fds.data(), fds.size() * sizeof(int));
  }
  const int64_t deadline_ns = DeadlineAfter(kSendTimeoutNs);
  bool enlarged = false;
  while (true) {
    if (sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) {
      return absl::OkStatus();
    }
    const int error_number = errno;
    if (error_number == EINTR) continue;
    if (error_number == EAGAIN || error_number == EWOULDBLOCK) {
      SDP_RETURN_IF_ERROR(WaitFor(socket, POLLOUT, deadline_ns, "send"));
      continue;
    }
    // The default buffer is smaller than our longest message.
    const int buffer_bytes = 2 * kMaxMessageBytes;
    if (error_number == EMSGSIZE && !enlarged &&
        setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &buffer_bytes,
                   sizeof(buffer_bytes)) == 0) {
      enlarged = true;
      continue;
    }
    return SendError(error_number);
  }
}

absl::StatusOr<Message> ReceiveMessage(int socket, int64_t timeout_ns) {
  const int64_t deadline_ns = DeadlineAfter(timeout_ns);
  Message message;
  message.payload.resize(kMaxMessageBytes);
  alignas(cmsghdr) char control[kFdSpace + kCredentialSpace];
  while (true) {
    SDP_RETURN_IF_ERROR(WaitFor(socket, POLLIN, deadline_ns, "receive"));
    iovec part = {message.payload.data(), message.payload.size()};
    msghdr header = {};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    const ssize_t got =
        recvmsg(socket, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got < 0) {
      // EAGAIN: another reader took the packet after the poll.
      if (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK) continue;
      if (errno == ECONNRESET) {
        return absl::UnavailableError(absl::StrCat("receive: ", kPeerLeft));
      }
      return ErrnoStatus(errno, "receive");
    }
    message.fds = TakeFds(&header);
    if ((header.msg_flags & MSG_TRUNC) != 0) {
      return absl::DataLossError(absl::StrCat("receive: a message longer than ",
                                              kMaxMessageBytes, " bytes"));
    }
    if ((header.msg_flags & MSG_CTRUNC) != 0) {
      return absl::DataLossError(absl::StrCat(
          "receive: descriptors of a message were lost after the first ",
          message.fds.size(),
          "; the limit on open files may be reached (ulimit -n)"));
    }
    if (got == 0) {
      if (!message.fds.empty()) {
        return absl::InvalidArgumentError("receive: an empty message");
      }
      return absl::CancelledError(absl::StrCat("receive: ", kPeerLeft));
    }
    message.payload.resize(static_cast<size_t>(got));
    return message;
  }
}

absl::StatusOr<UniqueFd> ConnectSeqpacket(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path) ||
      path.find('\0') != std::string::npos) {
    return InvalidInput(
        "", "socket path", path, "not a usable Unix socket path",
        absl::StrCat("use 1 to ", sizeof(address.sun_path) - 1, " bytes"));
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return ErrnoStatus(errno, absl::StrCat(path, ": socket"));

  // Connecting waits while the listener's queue is full; not for ever.
  const timeval limit = {kSendTimeoutNs / 1'000'000'000, 0};
  const timeval none = {};
  setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  while (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address),
                 sizeof(address)) != 0) {
    if (errno == EINTR) continue;
    if (errno == EISCONN) break;
    if (errno == EAGAIN) {
      return absl::DeadlineExceededError(absl::StrCat(
          path, ": connect: the listener accepts nobody; is it frozen?"));
    }
    return ErrnoStatus(errno, absl::StrCat(path, ": connect"));
  }
  setsockopt(fd.get(), SOL_SOCKET, SO_SNDTIMEO, &none, sizeof(none));
  return fd;
}

}  // namespace slidedp::shm
