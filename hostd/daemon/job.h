// A job as the core keeps it in memory.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hostd/daemon/admission.h"
#include "hostd/daemon/job_run.h"
#include "hostd/daemon/spec_check.h"
#include "hostd/daemon/step_records.h"
#include "hostd/journal/journal.h"
#include "policy/plan.h"

namespace slidedp::hostd {

// Loop thread only.
struct Job {
  Job(JobRow row, const std::string& log_folder)
      : row(std::move(row)), records(log_folder) {}

  JobRow row;
  // Of jobs that have not ended.
  std::optional<CheckedSpec> checked;
  std::optional<policy::Plan> plan;
  Demand demand;
  // From CONFIGURING until the memory is free, which may be a little after the
  // job's end.
  std::unique_ptr<JobRun> run;
  StepRecords records;
  uint64_t host_pss_bytes = 0;  // as measured last; 0: not measured
  // Largest seen; 0: not measured.
  uint64_t host_pss_peak_bytes = 0;
  uint64_t device_peak_bytes = 0;
  // The best is also of what the run goes on from. Not in the journal.
  std::optional<v1::EvalRecord> last_eval, best_eval;
  uint64_t loaded_bytes = 0, load_bytes = 0;  // as in v1::JobInfo
  // Not in the journal yet: an update failed and is tried again.
  bool unwritten = false;
  std::vector<v1::JobEvent> unwritten_events;
  // Counts what a watcher should see.
  uint64_t version = 1;
};

// What `identity`-blind clients get; the core redacts.
v1::JobInfo InfoOf(const Job& job);

}  // namespace slidedp::hostd
