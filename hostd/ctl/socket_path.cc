#include "hostd/ctl/socket_path.h"

#include <sys/stat.h>

#include "absl/strings/str_cat.h"
#include "hostd/ctl/resolve.h"

namespace slidedp::ctl {

absl::StatusOr<std::string> SocketPath(const std::string& flag,
                                       const Environment& environment) {
  for (const std::string& given : {flag, environment.socket}) {
    if (!given.empty()) return AbsolutePath(given, environment.current_folder);
  }
  struct stat info = {};
  std::string system =
      absl::StrCat(environment.system_root, "/run/slidedpd/slidedpd.sock");
  if (stat(system.c_str(), &info) == 0) return system;
  if (!environment.xdg_runtime_dir.empty()) {
    return absl::StrCat(environment.xdg_runtime_dir, "/slidedpd/slidedpd.sock");
  }
  std::string folder =
      absl::StrCat(environment.system_root, "/tmp/slidedpd-", environment.uid);
  if (lstat(folder.c_str(), &info) == 0 &&
      (!S_ISDIR(info.st_mode) || info.st_uid != environment.uid)) {
    return absl::PermissionDeniedError(absl::StrCat(
        folder, " belongs to uid ", info.st_uid, ", not to you; name the ",
        "daemon's socket with --socket or SLIDEDP_SOCKET"));
  }
  return absl::StrCat(folder, "/slidedpd.sock");
}

}  // namespace slidedp::ctl
