// The compute-only reference: slidedp-bench-ops step, run beside slidedpctl
// on one device with one rank's share of the work.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "hostd/ctl/bench.h"
#include "hostd/ctl/interrupt.h"
#include "hostd/ctl/json_form.h"

namespace slidedp::ctl {

// The line that it wrote. `micro_batches`: of one rank and step. `folder`
// takes its log and results.
absl::StatusOr<Json> RunReference(const std::string& program,
                                  const std::string& folder,
                                  const BenchOptions& options,
                                  const std::string& device,
                                  uint64_t micro_batches, Interrupt& interrupt);

}  // namespace slidedp::ctl
