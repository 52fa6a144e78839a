// Checks of this host and the daemon, each with what to do about it.
#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "hostd/ctl/environment.h"
#include "hostd/ctl/json_form.h"

namespace slidedp::ctl {

enum class Health { kOk, kWarn, kFail };
const char* Word(Health health);  // "ok", "warn", "fail"

struct Finding {
  std::string check;  // "memlock"
  Health health = Health::kOk;
  std::string found = {};
  std::string remedy = {};  // empty when there is nothing to do
};

// `socket`: where the daemon is expected. Reads below
// environment.system_root only.
std::vector<Finding> RunDoctor(const Environment& environment,
                               const std::string& socket);

bool AnyFailed(const std::vector<Finding>& findings);
Json JsonDoctor(const std::vector<Finding>& findings);
void PrintDoctor(const std::vector<Finding>& findings, bool headers, bool color,
                 std::ostream& out);

}  // namespace slidedp::ctl
