// Plan files: what a user may choose of a plan by hand, in YAML. `slidedpctl
// plan` prints what a job would get in the same form.
#pragma once

#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "hostd/ctl/json_form.h"
#include "policy/plan.h"
#include "proto/job.pb.h"

namespace slidedp::ctl {

// Puts the plan of `text` into the spec's tuning, where the spec leaves the
// choice to policy. `file` is for messages, `layers` the model's.
absl::Status ReadPlanFile(absl::string_view text, absl::string_view file,
                          int64_t layers, v1::JobSpec& spec);
// Reads spec.plan(), if there is one.
absl::Status ApplyPlanFile(int64_t layers, v1::JobSpec& spec);

// The plan as such a file; `title` goes into a comment.
void PrintPlanFile(const policy::Plan& plan, const std::string& title,
                   std::ostream& out);
// The same as JSON, which is YAML too.
Json JsonPlanFile(const policy::Plan& plan);

}  // namespace slidedp::ctl
