// A submitted job spec, trusted in nothing: ranges, the model's config, the
// plan and what it takes of the host.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "common/model/config.h"
#include "common/model/layout.h"
#include "policy/plan.h"
#include "proto/job.pb.h"

namespace slidedp::hostd {

// What the daemon itself brings into a plan.
struct HostFacts {
  int logical_cpus = 1;
  // For jobs that leave it open; 0: policy chooses.
  int update_threads = 0;
};

// Unknown fields, values out of range, text that can't be shown. Reads
// everything but model_config_json.
absl::Status CheckFields(const v1::JobSpec& spec);

struct CheckedSpec {
  model::ModelConfig config;
  model::StateLayout layout;
  policy::Problem problem;
  // The plan if the ranks' devices reach each other; joining may change it.
  policy::Plan plan;
};
// CheckFields, the config, and a plan.
absl::StatusOr<CheckedSpec> CheckSpec(const v1::JobSpec& spec,
                                      const HostFacts& facts);

// The plan to fall back on when a rank refuses `refused` or devices do not
// reach each other: full + cpu routes where the user fixed none. NotFound if
// the user fixed them or it is the same plan.
absl::StatusOr<policy::Plan> FallbackPlan(const CheckedSpec& checked,
                                          const policy::Plan& refused);

}  // namespace slidedp::hostd
