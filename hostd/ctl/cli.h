// slidedpctl as a function: command line in, exit code out. Data goes to
// environment.out, talk to environment.err.
#pragma once

#include <string>
#include <vector>

#include "hostd/ctl/environment.h"

namespace slidedp::ctl {

// `args` without the program's name.
int RunCtl(const std::vector<std::string>& args,
           const Environment& environment);

}  // namespace slidedp::ctl
