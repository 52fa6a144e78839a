// Which socket a command line means.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "hostd/ctl/environment.h"

namespace slidedp::ctl {

// `flag` (--socket), else the rule of common/base/socket_path.h; absolute.
absl::StatusOr<std::string> SocketPath(const std::string& flag,
                                       const Environment& environment);

}  // namespace slidedp::ctl
