// A job's data sets, as its spec describes them.
#pragma once

#include "absl/status/statusor.h"
#include "proto/job.pb.h"
#include "worker/data/mixture.h"

namespace slidedp::data {

// Reads and checks the files (hostile). Needs the spec's sequence length; the
// counts of its sources are not looked at.
absl::StatusOr<Mixture> OpenJobData(const v1::JobSpec& spec, int64_t vocab);

}  // namespace slidedp::data
