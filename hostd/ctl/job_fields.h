// The table of a job file's fields.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "hostd/ctl/scalar.h"
#include "proto/job.pb.h"

namespace slidedp::ctl {

// JobSpec.retries until ResolveJob settles it.
inline constexpr uint32_t kRetriesByDefault = ~uint32_t{0};

struct JobField {
  std::string key;      // dotted: "optimizer.lr"
  std::string initial;  // as --print-defaults writes it
  std::string help;
  // Reads a value into the spec, or says what is wrong with it.
  std::function<std::optional<Problem>(const YamlNode&, v1::JobSpec&)> read;
};

// In the order of the job file; fields of a group stand together.
const std::vector<JobField>& JobFields();

}  // namespace slidedp::ctl
