// A job's data sets, as its spec describes them.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/job.pb.h"
#include "worker/data/mixture.h"

namespace slidedp::data {

// Reads and checks the files (hostile). Needs the spec's sequence length; the
// counts of its sources are not looked at.
absl::StatusOr<Mixture> OpenJobData(const v1::JobSpec& spec, int64_t vocab);

// The held-out file, cut and packed as the job's data are: an evaluation
// measures what is trained. Which documents share a sequence does not depend on
// the job's seed. The spec has an evaluation.
absl::StatusOr<Dataset> OpenHeldOut(const v1::JobSpec& spec, int64_t vocab);

// What the job's submission says of a file: InvalidInput if it is another now.
struct Submitted {
  uint64_t sequences, tokens;
  uint32_t crc32c;
};
absl::Status CheckUnchanged(const Dataset& dataset, const Submitted& submitted);

}  // namespace slidedp::data
