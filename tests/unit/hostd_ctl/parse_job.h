// A job file's text as `slidedpctl submit` reads it.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "hostd/ctl/job_file.h"

namespace slidedp::ctl {

inline absl::StatusOr<v1::JobSpec> Parse(
    absl::string_view text, const std::vector<std::string>& sets = {}) {
  return ParseJobFile(text, "job.yaml", sets);
}

}  // namespace slidedp::ctl
