// The job state machine (proto/job.proto, JobState).
#pragma once

#include <string>

#include "absl/status/status.h"
#include "proto/job.pb.h"

namespace slidedp::hostd {

// PENDING -> CONFIGURING -> RUNNING -> COMPLETING -> COMPLETED; from each of
// the first four also -> FAILED or CANCELLED. Nothing leaves an end.
bool MayFollow(v1::JobState from, v1::JobState to);
bool HasEnded(v1::JobState state);
// Holds memory and workers: CONFIGURING, RUNNING, COMPLETING.
bool IsActive(v1::JobState state);

// What an active job of an earlier daemon becomes: its workers and memory are
// gone.
struct Recovered {
  v1::JobState state;
  std::string reason;
};
Recovered RecoverActive(v1::JobState state, bool cancel_requested);

}  // namespace slidedp::hostd
