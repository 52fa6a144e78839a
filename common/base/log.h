// Logging for people, through spdlog: few lines, each with role, rank and step
// where there is one. Numbers go to step reports and traces, not here.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "spdlog/spdlog.h"

namespace slidedp {

// "slidedpd", "rank 1"... Under systemd (`journal` true) lines carry a <N>
// priority prefix and no time. Lines go to standard error. Call once, in main.
// The level is a user's word: trace, debug, info, warning, error, critical or
// off; anything else is an error and changes nothing.
absl::Status InitLogging(const std::string& role, const std::string& level,
                         bool journal);

}  // namespace slidedp
