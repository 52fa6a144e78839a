#include "hostd/ctl/socket_path.h"

#include "common/base/socket_path.h"
#include "common/base/status.h"
#include "hostd/ctl/resolve.h"

namespace slidedp::ctl {

absl::StatusOr<std::string> SocketPath(const std::string& flag,
                                       const Environment& environment) {
  if (!flag.empty()) return AbsolutePath(flag, environment.current_folder);
  SDP_ASSIGN_OR_RETURN(
      std::string path,
      DaemonSocketPath({environment.uid, environment.socket,
                        environment.xdg_runtime_dir, environment.system_root}));
  return AbsolutePath(path, environment.current_folder);
}

}  // namespace slidedp::ctl
