// Following a job to its end: for submit --wait and --follow, watch, and
// cancel --wait.
#pragma once

#include <cstdint>
#include <functional>

#include "hostd/ctl/client.h"
#include "hostd/ctl/environment.h"
#include "hostd/ctl/exit_codes.h"

namespace slidedp::ctl {

struct FollowOptions {
  bool progress = false;    // bar or lines on stderr
  bool json = false;        // every state and step as a line on stdout
  int64_t deadline_ns = 0;  // MonotonicNs; 0: none
  uint64_t from_step = 0;
  // Exit code 0 whatever became of the job (cancel --wait).
  bool any_end_is_ok = false;
  // Say how to go on after Ctrl-C; not if the caller then ends the job.
  bool explain_interrupt = true;
  // Each step's record, once; may be empty.
  std::function<void(const v1::StepRecord& record)> on_step = {};
};

// Returns when the job has ended, at the deadline, or at Ctrl-C (the job goes
// on). Survives a restart of the daemon of up to 30 s.
ExitCode FollowJob(ControlClient& client, uint64_t id,
                   const FollowOptions& options,
                   const Environment& environment);

}  // namespace slidedp::ctl
