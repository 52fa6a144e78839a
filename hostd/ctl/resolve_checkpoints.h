// What a job's keys for checkpoints, resume and retries mean with the user's
// files.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "common/model/layout.h"
#include "proto/job.pb.h"

namespace slidedp::ctl {

// Absolute paths; the folder's default, beside the output.
void ResolveCheckpointPaths(const std::string& current_folder,
                            v1::JobSpec& spec);

// Retries, and whether folder and checkpoint are what the job needs. After the
// steps and the data are known. `file`: the job file, for messages.
absl::Status ResolveCheckpoints(absl::string_view file,
                                const model::StateLayout& layout,
                                v1::JobSpec& spec);

}  // namespace slidedp::ctl
