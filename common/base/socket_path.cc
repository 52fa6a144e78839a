#include "common/base/socket_path.h"

#include <sys/stat.h>

#include "absl/strings/str_cat.h"

namespace slidedp {

absl::StatusOr<std::string> DaemonSocketPath(
    const SocketSurroundings& surroundings) {
  if (!surroundings.socket.empty()) return surroundings.socket;
  struct stat info = {};
  const std::string system =
      absl::StrCat(surroundings.root, "/run/slidedpd/slidedpd.sock");
  if (stat(system.c_str(), &info) == 0) return system;
  if (!surroundings.xdg_runtime_dir.empty()) {
    return absl::StrCat(surroundings.xdg_runtime_dir,
                        "/slidedpd/slidedpd.sock");
  }
  const std::string folder =
      absl::StrCat(surroundings.root, "/tmp/slidedpd-", surroundings.uid);
  if (lstat(folder.c_str(), &info) == 0 &&
      (!S_ISDIR(info.st_mode) || info.st_uid != surroundings.uid)) {
    return absl::PermissionDeniedError(absl::StrCat(
        folder, " belongs to uid ", info.st_uid, ", not to you; name the ",
        "daemon's socket with --socket or SLIDEDP_SOCKET"));
  }
  return absl::StrCat(folder, "/slidedpd.sock");
}

}  // namespace slidedp
