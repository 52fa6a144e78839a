#include "hostd/daemon/spec_check.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "hostd/daemon/spec_values.h"
#include "policy/wire.h"

namespace slidedp::hostd {
namespace {

constexpr size_t kMaxNameBytes = 128;
constexpr size_t kMaxConfigBytes = 256 << 10;
constexpr uint64_t kMaxRanks = 64;
constexpr uint64_t kMaxSequenceLength = uint64_t{1} << 20;
constexpr uint64_t kMaxBatchSize = uint64_t{1} << 20;
constexpr uint64_t kMaxSteps = 1'000'000'000;
constexpr uint64_t kMaxPatterns = 64;
constexpr size_t kMaxPatternBytes = 256;
constexpr uint64_t kMaxRetries = 1000;
constexpr uint64_t kMaxKept = 1000;
constexpr uint64_t kMaxDatasetTokens = uint64_t{1} << 48;
constexpr int kMaxSources = 64;
constexpr double kLeastWeight = 1e-6, kLargestWeight = 1e6;
// Chunks of all ranks in one step: what the schedule may take of our memory.
constexpr uint64_t kMaxChunksPerStep = uint64_t{1} << 20;

// The name of the message that has a field which this release does not know.
std::string UnknownFieldIn(const google::protobuf::Message& message,
                           const std::string& name) {
  const google::protobuf::Reflection* reflection = message.GetReflection();
  if (!reflection->GetUnknownFields(message).empty()) return name;
  std::vector<const google::protobuf::FieldDescriptor*> fields;
  reflection->ListFields(message, &fields);
  for (const google::protobuf::FieldDescriptor* field : fields) {
    if (field->cpp_type() !=
        google::protobuf::FieldDescriptor::CPPTYPE_MESSAGE) {
      continue;
    }
    if (field->is_repeated()) {
      for (int i = 0; i < reflection->FieldSize(message, field); ++i) {
        std::string inner = UnknownFieldIn(
            reflection->GetRepeatedMessage(message, field, i), field->name());
        if (!inner.empty()) return inner;
      }
      continue;
    }
    std::string inner =
        UnknownFieldIn(reflection->GetMessage(message, field), field->name());
    if (!inner.empty()) return inner;
  }
  return "";
}

absl::Status CheckEnum(absl::string_view field, int value, bool known) {
  if (known) return absl::OkStatus();
  return Bad(field, absl::StrCat(value), "unknown",
             "slidedpctl and slidedpd must be of one release");
}

absl::Status CheckEnums(const v1::JobSpec& spec) {
  SDP_RETURN_IF_ERROR(CheckEnum("device", spec.device(),
                                v1::DeviceKind_IsValid(spec.device())));
  SDP_RETURN_IF_ERROR(
      CheckEnum("long_documents", spec.long_documents(),
                v1::LongDocuments_IsValid(spec.long_documents())));
  SDP_RETURN_IF_ERROR(CheckEnum("launch", spec.launch(),
                                v1::LaunchKind_IsValid(spec.launch())));
  SDP_RETURN_IF_ERROR(
      CheckEnum("schedule.kind", spec.schedule().kind(),
                v1::ScheduleKind_IsValid(spec.schedule().kind())));
  SDP_RETURN_IF_ERROR(
      CheckEnum("schedule.decay", spec.schedule().decay(),
                v1::DecayKind_IsValid(spec.schedule().decay())));
  const v1::Routes& routes = spec.routes();
  SDP_RETURN_IF_ERROR(CheckEnum("routes.params", routes.params(),
                                v1::ParamRoute_IsValid(routes.params())));
  SDP_RETURN_IF_ERROR(CheckEnum("routes.grads", routes.grads(),
                                v1::GradRoute_IsValid(routes.grads())));
  SDP_RETURN_IF_ERROR(CheckEnum("routes.reduce", routes.reduce(),
                                v1::ReduceDtype_IsValid(routes.reduce())));
  SDP_RETURN_IF_ERROR(
      CheckEnum("compute_dtype", spec.compute_dtype(),
                v1::ComputeDtype_IsValid(spec.compute_dtype())));
  SDP_RETURN_IF_ERROR(CheckEnum("update", spec.update_mode(),
                                v1::UpdateMode_IsValid(spec.update_mode())));
  if (spec.device() == v1::DEVICE_KIND_AUTO) {
    return Bad("device", "auto", "is not resolved to cpu or cuda",
               "let slidedpctl submit it");
  }
  return absl::OkStatus();
}

absl::Status CheckSchedule(const v1::JobSpec& spec) {
  const v1::Schedule& schedule = spec.schedule();
  SDP_RETURN_IF_ERROR(CheckCount("schedule.warmup_steps",
                                 schedule.warmup_steps(), 0, kMaxSteps));
  SDP_RETURN_IF_ERROR(
      CheckNumber("schedule.warmup_ratio", schedule.warmup_ratio(), 0, 1));
  SDP_RETURN_IF_ERROR(
      CheckNumber("schedule.min_lr_ratio", schedule.min_lr_ratio(), 0, 1));
  if (schedule.kind() != v1::SCHEDULE_KIND_WSD) return absl::OkStatus();
  SDP_RETURN_IF_ERROR(CheckCount("schedule.decay_steps", schedule.decay_steps(),
                                 1, spec.steps()));
  if (schedule.warmup_steps() <= spec.steps() - schedule.decay_steps()) {
    return absl::OkStatus();
  }
  return Bad("schedule.decay_steps", absl::StrCat(schedule.decay_steps()),
             absl::StrCat("with ", schedule.warmup_steps(),
                          " steps of warm-up more than the job's ",
                          spec.steps(), " steps"),
             "warm up or decay for fewer steps");
}

absl::Status CheckPatterns(
    absl::string_view field,
    const google::protobuf::RepeatedPtrField<std::string>& patterns) {
  SDP_RETURN_IF_ERROR(CheckCount(field, patterns.size(), 0, kMaxPatterns));
  for (const std::string& pattern : patterns) {
    SDP_RETURN_IF_ERROR(CheckText(field, pattern, kMaxPatternBytes));
  }
  return absl::OkStatus();
}

absl::Status CheckEvaluation(const v1::JobSpec& spec) {
  SDP_RETURN_IF_ERROR(CheckCount("early_stop.patience",
                                 spec.early_stop().patience(), 0, kMaxSteps));
  SDP_RETURN_IF_ERROR(CheckNumber("early_stop.min_delta",
                                  spec.early_stop().min_delta(), 0, 1e6));
  if (!spec.has_eval()) {
    if (spec.early_stop().patience() == 0) return absl::OkStatus();
    return Bad("early_stop.patience",
               absl::StrCat(spec.early_stop().patience()),
               "nothing is evaluated", "give eval.data, or leave it out");
  }
  const v1::Evaluation& eval = spec.eval();
  SDP_RETURN_IF_ERROR(CheckPath("eval.data", eval.data()));
  SDP_RETURN_IF_ERROR(
      CheckCount("eval.every_steps", eval.every_steps(), 0, kMaxSteps));
  SDP_RETURN_IF_ERROR(CheckCount("eval.dataset_tokens", eval.dataset_tokens(),
                                 1, kMaxDatasetTokens));
  SDP_RETURN_IF_ERROR(CheckCount("eval.dataset_sequences",
                                 eval.dataset_sequences(), 1,
                                 kMaxDatasetTokens));
  SDP_RETURN_IF_ERROR(CheckCount("eval.max_sequences", eval.max_sequences(), 1,
                                 eval.dataset_sequences()));
  return CheckCount("eval.dataset_valid_tokens", eval.dataset_valid_tokens(), 1,
                    eval.dataset_tokens());
}

absl::Status CheckTraining(const v1::JobSpec& spec) {
  const v1::Optimizer& optimizer = spec.optimizer();
  SDP_RETURN_IF_ERROR(CheckNumber("optimizer.lr", optimizer.lr(), 0, 10, true));
  constexpr double kBelowOne = 1 - 1e-12;
  SDP_RETURN_IF_ERROR(
      CheckNumber("optimizer.beta1", optimizer.beta1(), 0, kBelowOne));
  SDP_RETURN_IF_ERROR(
      CheckNumber("optimizer.beta2", optimizer.beta2(), 0, kBelowOne));
  SDP_RETURN_IF_ERROR(
      CheckNumber("optimizer.eps", optimizer.eps(), 0, 1, true));
  SDP_RETURN_IF_ERROR(
      CheckNumber("optimizer.weight_decay", optimizer.weight_decay(), 0, 10));
  SDP_RETURN_IF_ERROR(CheckSchedule(spec));
  SDP_RETURN_IF_ERROR(CheckPatterns("freeze", spec.freeze()));
  SDP_RETURN_IF_ERROR(
      CheckPatterns("optimizer.no_decay", optimizer.no_decay().patterns()));
  SDP_RETURN_IF_ERROR(
      CheckCount("max_skipped_steps", spec.max_skipped_steps(), 0, kMaxSteps));
  SDP_RETURN_IF_ERROR(
      CheckNumber("loss_spike_sigma", spec.loss_spike_sigma(), 0, 1e6));
  if (spec.has_max_grad_norm()) {
    SDP_RETURN_IF_ERROR(
        CheckNumber("max_grad_norm", spec.max_grad_norm(), 0, 1e30, true));
  }
  return absl::OkStatus();
}

absl::Status CheckSources(const v1::JobSpec& spec) {
  if (spec.sources().empty() || spec.sources_size() > kMaxSources) {
    return Bad("data", absl::StrCat(spec.sources_size(), " data sets"),
               "out of range", absl::StrCat("name 1 to ", kMaxSources));
  }
  uint64_t sequences = 0, tokens = 0, labels = 0;
  const bool weighted = spec.sources(0).weight() != 0;
  for (int i = 0; i < spec.sources_size(); ++i) {
    const v1::DataSource& source = spec.sources(i);
    const std::string field = absl::StrCat("data[", i, "]");
    SDP_RETURN_IF_ERROR(CheckPath(absl::StrCat(field, ".path"), source.path()));
    SDP_RETURN_IF_ERROR(CheckNumber(
        absl::StrCat(field, ".weight"), source.weight(),
        weighted ? kLeastWeight : 0, weighted ? kLargestWeight : 0));
    SDP_RETURN_IF_ERROR(CheckCount(absl::StrCat(field, ".sequences"),
                                   source.sequences(), 1, kMaxDatasetTokens));
    SDP_RETURN_IF_ERROR(CheckCount(absl::StrCat(field, ".tokens"),
                                   source.tokens(), 1, kMaxDatasetTokens));
    SDP_RETURN_IF_ERROR(CheckCount(absl::StrCat(field, ".used_tokens"),
                                   source.used_tokens(), 1, source.tokens()));
    SDP_RETURN_IF_ERROR(CheckCount(absl::StrCat(field, ".valid_tokens"),
                                   source.valid_tokens(), 1,
                                   source.used_tokens()));
    sequences += source.sequences();
    tokens += source.tokens();
    labels += source.valid_tokens();
  }
  if (sequences != spec.dataset_sequences() ||
      tokens != spec.dataset_tokens() ||
      labels != spec.dataset_valid_tokens()) {
    return Bad("dataset_sequences", absl::StrCat(spec.dataset_sequences()),
               "the totals are not those of the data sets",
               "let slidedpctl submit it");
  }
  return absl::OkStatus();
}

absl::Status CheckCheckpoints(const v1::JobSpec& spec) {
  const v1::Checkpoint& checkpoint = spec.checkpoint();
  SDP_RETURN_IF_ERROR(CheckCount("retries", spec.retries(), 0, kMaxRetries));
  if (!spec.resume().empty() && spec.resume() != "auto") {
    SDP_RETURN_IF_ERROR(CheckPath("resume", spec.resume()));
  }
  SDP_RETURN_IF_ERROR(CheckCount("checkpoint.every_steps",
                                 checkpoint.every_steps(), 0, kMaxSteps));
  SDP_RETURN_IF_ERROR(CheckNumber("checkpoint.every_minutes",
                                  checkpoint.every_minutes(), 0, 1e6));
  if (checkpoint.folder().empty()) {
    if (checkpoint.every_steps() == 0 && checkpoint.every_minutes() == 0 &&
        spec.resume() != "auto") {
      return absl::OkStatus();
    }
    return Bad("checkpoint.folder", "", "missing", "set it");
  }
  SDP_RETURN_IF_ERROR(CheckPath("checkpoint.folder", checkpoint.folder()));
  return CheckCount("checkpoint.keep", checkpoint.keep(), 1, kMaxKept);
}

absl::Status CheckDataset(const v1::JobSpec& spec) {
  SDP_RETURN_IF_ERROR(CheckCount("dataset_sequences", spec.dataset_sequences(),
                                 1, kMaxDatasetTokens));
  SDP_RETURN_IF_ERROR(CheckCount("dataset_tokens", spec.dataset_tokens(), 1,
                                 kMaxDatasetTokens));
  if (spec.dataset_valid_tokens() == 0) {
    return Bad("dataset_valid_tokens", "0",
               "no token of the data counts in the loss",
               "look at the samples that slidedp-prepare prints");
  }
  SDP_RETURN_IF_ERROR(CheckCount("dataset_valid_tokens",
                                 spec.dataset_valid_tokens(), 1,
                                 spec.dataset_tokens()));
  SDP_RETURN_IF_ERROR(
      CheckCount("max_tokens", spec.max_tokens(), 0, kMaxDatasetTokens));
  SDP_RETURN_IF_ERROR(CheckCount(
      "documents_per_sequence", spec.documents_per_sequence(),
      spec.packing() ? 1 : 0, spec.packing() ? spec.sequence_length() : 0));
  return CheckSources(spec);
}

}  // namespace

absl::Status CheckFields(const v1::JobSpec& spec) {
  SDP_RETURN_IF_ERROR(CheckCount("version", spec.version(), 1, 1));
  if (std::string message = UnknownFieldIn(spec, "the spec");
      !message.empty()) {
    return Bad(message, "", "holds a field that this slidedpd does not know",
               "slidedpctl and slidedpd must be of one release");
  }
  SDP_RETURN_IF_ERROR(CheckText("name", spec.name(), kMaxNameBytes));
  SDP_RETURN_IF_ERROR(CheckPath("model", spec.model()));
  // Only what can be made again may be dropped.
  if (!spec.output().empty() || !spec.has_random_weights_seed()) {
    SDP_RETURN_IF_ERROR(CheckPath("output", spec.output()));
  }
  if (!spec.plan().empty()) {
    SDP_RETURN_IF_ERROR(CheckPath("plan", spec.plan()));
  }
  if (spec.output() == spec.model()) {
    return Bad("output", spec.output(), "is the model's own folder",
               "name a folder that does not exist yet");
  }
  SDP_RETURN_IF_ERROR(CheckCount("ranks", spec.ranks(), 1, kMaxRanks));
  SDP_RETURN_IF_ERROR(CheckCount("sequence_length", spec.sequence_length(), 1,
                                 kMaxSequenceLength));
  SDP_RETURN_IF_ERROR(
      CheckCount("batch_size", spec.batch_size(), 1, kMaxBatchSize));
  SDP_RETURN_IF_ERROR(CheckCount("micro_batch_size", spec.micro_batch_size(), 1,
                                 spec.batch_size()));
  SDP_RETURN_IF_ERROR(CheckCount("steps", spec.steps(), 1, kMaxSteps));
  SDP_RETURN_IF_ERROR(
      CheckNumber("epochs", spec.epochs(), 0, static_cast<double>(kMaxSteps)));
  SDP_RETURN_IF_ERROR(CheckEnums(spec));
  SDP_RETURN_IF_ERROR(CheckCheckpoints(spec));
  SDP_RETURN_IF_ERROR(CheckTraining(spec));
  SDP_RETURN_IF_ERROR(CheckDataset(spec));
  SDP_RETURN_IF_ERROR(CheckEvaluation(spec));
  if (!spec.tensorboard().empty()) {
    SDP_RETURN_IF_ERROR(CheckPath("tensorboard", spec.tensorboard()));
  }
  if (spec.model_config_json().empty() ||
      spec.model_config_json().size() > kMaxConfigBytes) {
    return Bad("model_config_json",
               absl::StrCat(spec.model_config_json().size(), " bytes"),
               "not the size of a config.json",
               absl::StrCat("use 1 to ", kMaxConfigBytes, " bytes"));
  }
  return absl::OkStatus();
}

absl::StatusOr<CheckedSpec> CheckSpec(const v1::JobSpec& spec,
                                      const HostFacts& facts) {
  SDP_RETURN_IF_ERROR(CheckFields(spec));
  CheckedSpec checked;
  SDP_ASSIGN_OR_RETURN(
      checked.config,
      model::ParseModelConfig(spec.model_config_json(),
                              absl::StrCat(spec.model(), "/config.json")));
  SDP_ASSIGN_OR_RETURN(
      checked.problem,
      policy::ProblemOf(spec, checked.config,
                        spec.device() == v1::DEVICE_KIND_CUDA
                            ? policy::DeviceKind::kCuda
                            : policy::DeviceKind::kCpu,
                        /*peer_access=*/true, facts.logical_cpus));
  if (checked.problem.update_threads == 0) {
    checked.problem.update_threads = facts.update_threads;
  }
  SDP_ASSIGN_OR_RETURN(checked.plan, policy::MakePlan(checked.problem));
  checked.layout = model::MakeStateLayout(checked.config);
  SDP_RETURN_IF_ERROR(Annotate(
      model::ApplyRules(policy::RulesOf(spec), checked.layout), "job spec"));

  uint64_t chunks = 0;
  for (const model::Unit& unit : checked.layout.units) {
    chunks += CeilDiv(unit.count * 2, checked.plan.d2h_chunk_bytes) + 1;
  }
  if (chunks > kMaxChunksPerStep / spec.ranks()) {
    return Bad("tuning.d2h_chunk_bytes",
               absl::StrCat(checked.plan.d2h_chunk_bytes),
               absl::StrCat("cuts a step into ", chunks, " chunks per rank"),
               "choose larger chunks, or leave it out");
  }
  return checked;
}

absl::StatusOr<policy::Plan> FallbackPlan(const CheckedSpec& checked,
                                          const policy::Plan& refused) {
  const policy::Problem& asked = checked.problem;
  if (asked.params && asked.grads) {
    return absl::NotFoundError("the job fixes its routes");
  }
  policy::Problem problem = asked;
  if (!problem.params) problem.params = policy::ParamRoute::kFull;
  if (!problem.grads) {
    problem.grads = problem.ranks > 1 ? policy::GradRoute::kCpu
                                      : policy::GradRoute::kGpuRoot;
  }
  SDP_ASSIGN_OR_RETURN(policy::Plan plan, policy::MakePlan(problem));
  if (policy::PlanHash(plan) == policy::PlanHash(refused)) {
    return absl::NotFoundError("there is no plan with fewer demands");
  }
  return plan;
}

}  // namespace slidedp::hostd
