// A daemon's proposal, read and checked by the rank that it is made to.
#pragma once

#include "absl/status/statusor.h"
#include "common/device/device.h"
#include "common/model/config.h"
#include "common/model/layout.h"
#include "policy/plan.h"
#include "proto/control.pb.h"
#include "worker/data/step_batch.h"

namespace slidedp::session {

struct Proposal {
  v1::JobSpec spec;
  model::ModelConfig config;
  model::StateLayout layout;
  policy::Plan plan;
  // v1::Propose's.
  std::string resume;
  uint32_t attempt = 0;
  bool output_may_be_there = false;

  data::BatchShape batch_shape() const;
};

// `device` is this rank's. The error's message is what goes into Refuse.
absl::StatusOr<Proposal> ReadProposal(const v1::Propose& propose, uint32_t rank,
                                      device::Kind device);

}  // namespace slidedp::session
