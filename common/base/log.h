// Logging for people, through spdlog: few lines, each with role, rank and step
// where there is one. Numbers go to step reports and traces, not here.
#pragma once

#include <string>

#include "spdlog/spdlog.h"

namespace slidedp {

// "slidedpd", "rank 1"... Under systemd (`journal` true) lines carry a <N>
// priority prefix and no time. Call once, in main.
void InitLogging(const std::string& role, const std::string& level,
                 bool journal);

}  // namespace slidedp
