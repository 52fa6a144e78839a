// The daemon's lock, its two listening sockets, and what systemd hands over.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/fd.h"

namespace slidedp::hostd {

// Makes the folder if it is absent; then it must be ours, a folder, and with
// `private_folder` closed to others.
absl::Status PrepareFolder(const std::string& path, bool private_folder);

// An exclusive lock on a file, with our pid in it; the file is removed with it.
// FailedPrecondition, naming the holder, if another process has it.
class LockFile {
 public:
  static absl::StatusOr<LockFile> Take(const std::string& path);
  LockFile(LockFile&&) = default;
  ~LockFile();

 private:
  LockFile(std::string path, UniqueFd fd)
      : path_(std::move(path)), fd_(std::move(fd)) {}
  std::string path_;
  UniqueFd fd_;
};

// A listening Unix socket. Reachable by everybody who can reach the folder;
// who connects is judged by SO_PEERCRED.
struct ListeningSocket {
  UniqueFd fd;
  std::string path;
  bool inherited = false;  // the service manager's: not ours to remove
};
// Only under the lock: replaces what an earlier daemon left at `path`.
absl::StatusOr<ListeningSocket> Listen(const std::string& path, int type);

// The sockets that a service manager passed (LISTEN_PID, LISTEN_FDS as in the
// environment; empty: none).
struct InheritedSockets {
  ListeningSocket control;  // SOCK_STREAM; fd invalid if there is none
  ListeningSocket attach;   // SOCK_SEQPACKET
};
absl::StatusOr<InheritedSockets> TakeInherited(const std::string& listen_pid,
                                               const std::string& listen_fds);

// One datagram to the service manager, "READY=1"; nothing if `notify_socket`
// (NOTIFY_SOCKET) is empty.
absl::Status Notify(const std::string& notify_socket,
                    const std::string& message);

}  // namespace slidedp::hostd
