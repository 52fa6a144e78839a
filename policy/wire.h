// Between policy's plain structs and their protobuf forms.
#pragma once

#include "absl/status/statusor.h"
#include "common/model/tensor_rules.h"
#include "policy/plan.h"
#include "proto/job.pb.h"
#include "proto/plan.pb.h"

namespace slidedp::policy {

v1::Plan ToWire(const Plan& plan);
// Refuses unknown versions, unset enums and values out of range.
absl::StatusOr<Plan> FromWire(const v1::Plan& wire);

// The planning problem that a job spec states. `peer_access` and
// `logical_cpus` come from the workers and the host; `device` is resolved.
absl::StatusOr<Problem> ProblemOf(const v1::JobSpec& spec,
                                  const model::ModelConfig& config,
                                  DeviceKind device, bool peer_access,
                                  int logical_cpus);

model::TensorRules RulesOf(const v1::JobSpec& spec);

}  // namespace slidedp::policy
