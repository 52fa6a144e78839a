#include "worker/session/proposal.h"

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/device/accelerator.h"
#include "policy/wire.h"

namespace slidedp::session {
namespace {

absl::Status Refused(absl::string_view what) {
  return absl::FailedPreconditionError(what);
}

absl::Status CheckDevice(const v1::JobSpec& spec, const policy::Plan& plan,
                         device::Kind device) {
  const bool planned = plan.device == policy::DeviceKind::kCuda;
  const bool asked = spec.device() == v1::DEVICE_KIND_CUDA;
  const bool have = device == device::Kind::kCuda;
  if ((planned || asked) && !device::AcceleratorIsBuilt()) {
    return Refused(
        "this build has no CUDA; submit the job with device: cpu, or install a "
        "build with CUDA");
  }
  if (planned == have && asked == have) return absl::OkStatus();
  auto word = [](bool cuda) { return cuda ? "cuda" : "cpu"; };
  return Refused(absl::StrCat("the plan is for device ", word(planned),
                              ", the job spec for ", word(asked),
                              "; this worker was started for ", word(have)));
}

// What the plan must repeat from the spec: a difference would train something
// else than was asked for.
absl::Status CheckSizes(const Proposal& proposal, uint32_t rank) {
  const v1::JobSpec& spec = proposal.spec;
  const policy::Plan& plan = proposal.plan;
  const auto ranks = static_cast<uint64_t>(plan.ranks);
  const auto micro_batch = static_cast<uint64_t>(plan.micro_batch_size);
  struct Pair {
    absl::string_view name;
    uint64_t planned, asked;
  };
  const Pair pairs[] = {
      {"ranks", ranks, spec.ranks()},
      {"sequence_length", static_cast<uint64_t>(plan.sequence_length),
       spec.sequence_length()},
      {"micro_batch_size", micro_batch, spec.micro_batch_size()},
      {"micro_batches", static_cast<uint64_t>(plan.micro_batches),
       CeilDiv(spec.batch_size(), ranks * micro_batch)},
  };
  for (const Pair& pair : pairs) {
    if (pair.planned != pair.asked) {
      return Refused(absl::StrCat("the plan has ", pair.name, " ", pair.planned,
                                  ", the job spec ", pair.asked));
    }
  }
  if (rank >= ranks) {
    return Refused(absl::StrCat("rank ", rank, " is not one of ", ranks));
  }
  if (spec.batch_size() == 0 || spec.steps() == 0) {
    return Refused("the job spec has no batch_size or no steps");
  }
  if (spec.sequence_length() >
      static_cast<uint64_t>(proposal.config.max_position)) {
    return Refused(absl::StrCat("sequence_length ", spec.sequence_length(),
                                " is beyond the model's ",
                                proposal.config.max_position, " positions"));
  }
  const bool eager = plan.update_mode == policy::UpdateMode::kEager;
  if (eager == spec.has_max_grad_norm()) {
    return Refused(absl::StrCat(
        "the plan's update mode ", policy::Name(plan.update_mode),
        " does not fit a job ", eager ? "with" : "without", " max_grad_norm"));
  }
  return absl::OkStatus();
}

}  // namespace

data::BatchShape Proposal::batch_shape() const {
  data::BatchShape shape;
  shape.ranks = plan.ranks;
  shape.batch_size = static_cast<int64_t>(spec.batch_size());
  shape.micro_batch_size = plan.micro_batch_size;
  shape.micro_batches = plan.micro_batches;
  shape.documents_per_sequence = plan.documents_per_sequence;
  if (spec.epochs() > 0) {
    shape.end_position =
        data::EpochPositions(spec.epochs(), spec.dataset_sequences());
  }
  return shape;
}

absl::StatusOr<Proposal> ReadProposal(const v1::Propose& propose, uint32_t rank,
                                      device::Kind device) {
  Proposal proposal;
  proposal.spec = propose.spec();
  proposal.resume = propose.resume();
  proposal.attempt = propose.attempt();
  proposal.output_may_be_there = propose.output_may_be_there();
  if (proposal.spec.version() != 1) {
    return Refused(absl::StrCat("job spec version ", proposal.spec.version(),
                                " is not known here"));
  }
  SDP_ASSIGN_OR_RETURN(proposal.plan, policy::FromWire(propose.plan()));
  SDP_RETURN_IF_ERROR(CheckDevice(proposal.spec, proposal.plan, device));
  SDP_ASSIGN_OR_RETURN(proposal.config, model::ParseModelConfig(
                                            proposal.spec.model_config_json(),
                                            absl::StrCat(proposal.spec.model(),
                                                         "/config.json")));
  SDP_RETURN_IF_ERROR(CheckSizes(proposal, rank));
  proposal.layout = model::MakeStateLayout(proposal.config);
  SDP_RETURN_IF_ERROR(
      model::ApplyRules(policy::RulesOf(proposal.spec), proposal.layout));
  return proposal;
}

}  // namespace slidedp::session
