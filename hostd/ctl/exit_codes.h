// slidedpctl's exit codes: a contract with scripts, the same for every verb.
#pragma once

#include "absl/status/status.h"

namespace slidedp::ctl {

enum ExitCode : int {
  kExitOk = 0,
  kExitFailure = 1,        // anything not below; a job that FAILED (--wait)
  kExitUsage = 2,          // the command line
  kExitNotFound = 3,       // no such job
  kExitPermission = 4,     // not yours, or the socket is closed to you
  kExitUnreachable = 5,    // no daemon answers
  kExitWrongState = 6,     // the job or the daemon is in another state
  kExitTimeout = 7,        // --timeout passed first
  kExitCancelled = 8,      // the job was CANCELLED (--wait)
  kExitInterrupted = 130,  // Ctrl-C while following; the job goes on
};

// Of a failed call to the daemon.
ExitCode ExitCodeOfCall(const absl::Status& status);

}  // namespace slidedp::ctl
