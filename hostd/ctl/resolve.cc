#include "hostd/ctl/resolve.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/fd.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/model/output.h"
#include "common/model/source.h"
#include "hostd/ctl/data_summary.h"
#include "hostd/ctl/json_form.h"
#include "hostd/ctl/plan_file.h"
#include "hostd/ctl/resolve_checkpoints.h"
#include "policy/gpu_memory.h"
#include "policy/wire.h"
#include "worker/data/job_data.h"
#include "worker/data/step_batch.h"

namespace slidedp::ctl {
namespace {

// From here on the padding is worth a word.
constexpr double kMuchPadding = 0.25;

absl::Status Missing(absl::string_view file, absl::string_view field,
                     absl::string_view remedy) {
  return InvalidInput(file, field, "", "is required", remedy);
}

absl::Status CheckRequired(const v1::JobSpec& spec, absl::string_view file) {
  if (spec.model().empty()) {
    return Missing(file, "model", "give a Hugging Face model folder");
  }
  if (spec.sources().empty()) {
    return Missing(file, "data", "give a dataset made by slidedp-prepare");
  }
  if (spec.output().empty() && !spec.has_random_weights_seed()) {
    return Missing(file, "output", "give a folder that does not exist yet");
  }
  return absl::OkStatus();
}

// The file's name without its folder and ending, as far as it can be a name.
std::string NameFromFile(const std::string& file) {
  std::string stem = std::filesystem::path(file).stem().string();
  std::string name;
  for (char c : stem) {
    bool fits = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                (c >= '0' && c <= '9') || c == '.' || c == '_' || c == '-';
    if (name.size() < 64) name += fits ? c : '-';
  }
  return name.empty() || name == "-" ? "job" : name;
}

void ResolvePaths(const ResolveContext& context, v1::JobSpec& spec) {
  spec.set_model(AbsolutePath(spec.model(), context.current_folder));
  for (v1::DataSource& source : *spec.mutable_sources()) {
    source.set_path(AbsolutePath(source.path(), context.current_folder));
  }
  if (!spec.output().empty()) {
    spec.set_output(AbsolutePath(spec.output(), context.current_folder));
  }
  if (!spec.plan().empty()) {
    spec.set_plan(AbsolutePath(spec.plan(), context.current_folder));
  }
  if (!spec.tensorboard().empty()) {
    spec.set_tensorboard(
        AbsolutePath(spec.tensorboard(), context.current_folder));
  }
  ResolveCheckpointPaths(context.current_folder, spec);
  if (spec.name().empty()) spec.set_name(NameFromFile(context.file));
}

absl::Status CheckWeights(const v1::JobSpec& spec,
                          const model::StateLayout& layout,
                          absl::string_view file) {
  absl::StatusOr<model::TensorSource> source =
      model::OpenModelFolder(spec.model());
  const absl::Status valid =
      source.ok() ? model::ValidateSource(layout, *source) : source.status();
  return Annotate(valid, absl::StrCat(file, ": model"));
}

absl::Status CheckOutput(const v1::JobSpec& spec, absl::string_view file) {
  namespace fs = std::filesystem;
  auto inside = [](const fs::path& inner, const fs::path& outer) {
    auto [o, i] =
        std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end());
    return o == outer.end();
  };
  if (inside(spec.output(), spec.model())) {
    return InvalidInput(file, "output", spec.output(),
                        "lies in the model's own folder",
                        "give a folder outside it");
  }
  return Annotate(model::CheckOutputPath(spec.output()),
                  absl::StrCat(file, ": output"));
}

absl::Status ResolveSteps(const data::Mixture& data, absl::string_view file,
                          v1::JobSpec& spec) {
  if (spec.steps() == 0) {
    if (spec.epochs() == 0 && spec.max_tokens() == 0) spec.set_epochs(3);
    uint64_t positions =
        spec.max_tokens() > 0
            ? data.PositionsOfTokens(spec.max_tokens())
            : data::EpochPositions(spec.epochs(), spec.dataset_sequences());
    spec.set_steps(
        std::max<uint64_t>(1, CeilDiv(positions, spec.batch_size())));
  }
  return absl::OkStatus();
}

// After the steps are known.
absl::Status ResolveSchedule(absl::string_view file, v1::JobSpec& spec) {
  v1::Schedule& schedule = *spec.mutable_schedule();
  const auto steps = static_cast<double>(spec.steps());
  if (schedule.warmup_ratio() > 0) {
    if (schedule.warmup_steps() > 0) {
      return InvalidInput(
          file, "schedule.warmup_ratio", absl::StrCat(schedule.warmup_ratio()),
          "given together with schedule.warmup_steps", "keep one of the two");
    }
    // As transformers has it.
    schedule.set_warmup_steps(
        static_cast<uint64_t>(std::ceil(steps * schedule.warmup_ratio())));
  }
  const bool wsd = schedule.kind() == v1::SCHEDULE_KIND_WSD;
  const char* only_wsd = "has a use only with schedule.kind wsd";
  if (!wsd && schedule.decay_steps() > 0) {
    return InvalidInput(file, "schedule.decay_steps",
                        absl::StrCat(schedule.decay_steps()), only_wsd,
                        "leave it out");
  }
  if (!wsd && schedule.decay() != v1::DECAY_KIND_COSINE) {
    return InvalidInput(file, "schedule.decay", Word(schedule.decay()),
                        only_wsd, "leave it out");
  }
  if (!wsd && schedule.kind() != v1::SCHEDULE_KIND_COSINE &&
      schedule.min_lr_ratio() > 0) {
    return InvalidInput(
        file, "schedule.min_lr_ratio", absl::StrCat(schedule.min_lr_ratio()),
        absl::StrCat("has no use with schedule.kind ", Word(schedule.kind())),
        "use cosine or wsd, or leave it out");
  }
  if (wsd && schedule.decay_steps() == 0) {
    schedule.set_decay_steps(std::max<uint64_t>(1, CeilDiv(spec.steps(), 10)));
  }
  if (schedule.warmup_steps() + schedule.decay_steps() > spec.steps()) {
    return InvalidInput(
        file, "schedule.warmup_steps", absl::StrCat(schedule.warmup_steps()),
        absl::StrCat(wsd ? absl::StrCat("with ", schedule.decay_steps(),
                                        " steps of decay ")
                         : "",
                     "more than the job's ", spec.steps(), " steps"),
        wsd ? "warm up or decay for fewer steps" : "warm up for fewer steps");
  }
  return absl::OkStatus();
}

// The held-out data, if any.
absl::Status ResolveEvaluation(const ResolveContext& context, int64_t vocab,
                               v1::JobSpec& spec) {
  if (spec.eval().data().empty()) {
    const bool asked = spec.eval().every_steps() > 0 ||
                       spec.eval().max_sequences() > 0 ||
                       spec.early_stop().patience() > 0;
    spec.clear_eval();
    if (!asked) return absl::OkStatus();
    return Missing(context.file, "eval.data",
                   "give a dataset made by slidedp-prepare, or leave out eval "
                   "and early_stop");
  }
  v1::Evaluation& eval = *spec.mutable_eval();
  eval.set_data(AbsolutePath(eval.data(), context.current_folder));
  absl::StatusOr<data::Dataset> dataset = data::OpenHeldOut(spec, vocab);
  if (!dataset.ok()) {
    return Annotate(dataset.status(),
                    absl::StrCat(context.file, ": eval.data"));
  }
  spec.set_documents_per_sequence(std::max<uint64_t>(
      spec.documents_per_sequence(), dataset->documents_per_sequence()));
  eval.set_dataset_sequences(dataset->sequences());
  eval.set_dataset_tokens(dataset->tokens());
  eval.set_dataset_crc32c(dataset->crc32c());
  eval.set_max_sequences(
      eval.max_sequences() == 0
          ? dataset->sequences()
          : std::min(eval.max_sequences(), dataset->sequences()));
  uint64_t valid_tokens = 0;
  for (uint64_t i = 0; i < eval.max_sequences(); ++i) {
    valid_tokens += dataset->LabelCount(i);
  }
  if (valid_tokens == 0) {
    return InvalidInput(
        context.file, "eval.data", eval.data(),
        absl::StrCat("no token of its first ", eval.max_sequences(),
                     " sequences counts in the loss"),
        "look at the samples that slidedp-prepare prints");
  }
  eval.set_dataset_valid_tokens(valid_tokens);
  if (eval.every_steps() > 0 || spec.early_stop().patience() == 0) {
    return absl::OkStatus();
  }
  return Missing(context.file, "eval.every_steps",
                 "early_stop needs evaluations on the way");
}

void AddWarnings(const v1::JobSpec& spec, std::vector<std::string>& warnings) {
  if (spec.dataset_sequences() < spec.batch_size()) {
    warnings.push_back(absl::StrCat(
        "the dataset has ", spec.dataset_sequences(), " sequences of ",
        spec.sequence_length(), " tokens and batch_size is ", spec.batch_size(),
        ": every step sees some of them more than once"));
  }
  const DataSummary summary = SummarizeData(spec);
  if (!spec.packing() && summary.padding_share > kMuchPadding) {
    warnings.push_back(absl::StrFormat(
        "%.0f%% of what is computed is padding: packing: true would put the "
        "documents of %d sequences into about %d (batch_size counts "
        "sequences, so it should then be lower)",
        100 * summary.padding_share, spec.dataset_sequences(),
        summary.fewest_sequences));
  }
  for (const v1::DataSource& source : spec.sources()) {
    if (spec.long_documents() == v1::LONG_DOCUMENTS_TRUNCATE &&
        source.used_tokens() < source.tokens()) {
      warnings.push_back(absl::StrCat(source.path(),
                                      ": long_documents: truncate leaves out ",
                                      source.tokens() - source.used_tokens(),
                                      " of ", source.tokens(), " tokens"));
    }
  }
  if (spec.batch_size() < spec.ranks() * spec.micro_batch_size()) {
    warnings.push_back(absl::StrCat(
        "batch_size ", spec.batch_size(), " is less than ranks x ",
        "micro_batch_size = ", spec.ranks() * spec.micro_batch_size(),
        ": some ranks compute on padding only"));
  }
}

}  // namespace

std::string AbsolutePath(const std::string& path,
                         const std::string& current_folder) {
  namespace fs = std::filesystem;
  fs::path absolute = (fs::path(current_folder) / path).lexically_normal();
  std::string text = absolute.string();
  while (text.size() > 1 && text.back() == '/') text.pop_back();
  return text;
}

absl::StatusOr<ModelFacts> ReadModelFacts(const std::string& folder) {
  std::string file = absl::StrCat(folder, "/config.json");
  absl::StatusOr<std::string> json = ReadFile(file, kMaxModelConfigBytes);
  if (!json.ok()) {
    return Annotate(
        json.status(),
        absl::StrCat("model folder ", folder, " has no readable config.json"));
  }
  ModelFacts facts;
  facts.config_json = *std::move(json);
  SDP_ASSIGN_OR_RETURN(facts.config,
                       model::ParseModelConfig(facts.config_json, file));
  facts.layout = model::MakeStateLayout(facts.config);
  return facts;
}

uint64_t PlannedBytes::Total(const std::vector<policy::NamedBytes>& parts) {
  uint64_t total = 0;
  for (const policy::NamedBytes& part : parts) total += part.bytes;
  return total;
}

absl::StatusOr<PlannedBytes> PlanBytes(const v1::JobSpec& spec,
                                       const ModelFacts& facts,
                                       int logical_cpus,
                                       uint64_t gpu_memory_bytes) {
  policy::DeviceKind device = spec.device() == v1::DEVICE_KIND_CUDA
                                  ? policy::DeviceKind::kCuda
                                  : policy::DeviceKind::kCpu;
  SDP_ASSIGN_OR_RETURN(policy::Problem problem,
                       policy::ProblemOf(spec, facts.config, device,
                                         /*peer_access=*/true, logical_cpus));
  PlannedBytes bytes;
  if (device == policy::DeviceKind::kCuda) {
    bytes.gpu_memory_bytes = gpu_memory_bytes;
    bytes.gpu_allowance = policy::GpuAllowance(problem);
    SDP_ASSIGN_OR_RETURN(problem.device_memory_bytes,
                         policy::GpuBufferBytes(problem, gpu_memory_bytes));
  }
  SDP_ASSIGN_OR_RETURN(bytes.plan, policy::MakePlan(problem));
  bytes.host = policy::HostSegments(facts.layout, bytes.plan);
  bytes.device = policy::DeviceBuffers(facts.config, facts.layout, bytes.plan);
  return bytes;
}

absl::Status ResolveSequenceLength(const ModelFacts& facts,
                                   absl::string_view file, v1::JobSpec& spec) {
  uint64_t longest = facts.config.max_position;
  if (spec.sequence_length() == 0) {
    spec.set_sequence_length(std::min(kDefaultSequenceLength, longest));
  }
  if (spec.sequence_length() > longest) {
    return InvalidInput(file, "sequence_length",
                        absl::StrCat(spec.sequence_length()),
                        absl::StrCat("the model takes at most ", longest,
                                     " positions (max_position_embeddings)"),
                        absl::StrCat("use ", longest, " or less"));
  }
  return absl::OkStatus();
}

absl::StatusOr<data::Mixture> ResolveData(const ModelFacts& facts,
                                          absl::string_view file,
                                          v1::JobSpec& spec) {
  absl::StatusOr<data::Mixture> data =
      data::OpenJobData(spec, facts.config.vocab);
  if (!data.ok()) {
    return Annotate(data.status(), absl::StrCat(file, ": data"));
  }
  for (int i = 0; i < spec.sources_size(); ++i) {
    const data::Dataset& dataset = data->datasets()[i];
    v1::DataSource& source = *spec.mutable_sources(i);
    source.set_sequences(dataset.sequences());
    source.set_tokens(dataset.tokens());
    source.set_used_tokens(dataset.used_tokens());
    source.set_valid_tokens(dataset.valid_tokens());
    source.set_crc32c(dataset.crc32c());
  }
  spec.set_dataset_sequences(data->sequences());
  spec.set_dataset_tokens(data->tokens());
  spec.set_dataset_valid_tokens(data->valid_tokens());
  spec.set_documents_per_sequence(data->documents_per_sequence());
  return data;
}

absl::StatusOr<ResolvedJob> ResolveJob(v1::JobSpec spec,
                                       const ResolveContext& context) {
  SDP_RETURN_IF_ERROR(CheckRequired(spec, context.file));
  ResolvePaths(context, spec);
  ResolvedJob job;
  absl::StatusOr<ModelFacts> facts = ReadModelFacts(spec.model());
  if (!facts.ok()) {
    return Annotate(facts.status(), absl::StrCat(context.file, ": model"));
  }
  job.model = *std::move(facts);
  SDP_RETURN_IF_ERROR(
      Annotate(model::ApplyRules(policy::RulesOf(spec), job.model.layout),
               context.file));
  SDP_RETURN_IF_ERROR(ResolveSequenceLength(job.model, context.file, spec));
  SDP_RETURN_IF_ERROR(ApplyPlanFile(job.model.config.layers, spec));

  // Planning is cheap and names bad sizes, so it comes before reading data.
  const bool by_daemon = spec.launch() == v1::LAUNCH_KIND_DAEMON;
  SDP_ASSIGN_OR_RETURN(ChosenDevice chosen,
                       ChooseDevice(spec.device(), by_daemon ? spec.ranks() : 0,
                                    context.file, context.find_gpus));
  spec.set_device(chosen.device);
  if (!chosen.warning.empty()) job.warnings.push_back(chosen.warning);
  absl::StatusOr<PlannedBytes> bytes =
      PlanBytes(spec, job.model, context.logical_cpus, chosen.gpu_memory_bytes);
  if (!bytes.ok()) return Annotate(bytes.status(), context.file);
  job.bytes = *std::move(bytes);

  if (!spec.has_random_weights_seed()) {
    SDP_RETURN_IF_ERROR(CheckWeights(spec, job.model.layout, context.file));
  }
  if (!spec.output().empty()) {
    SDP_RETURN_IF_ERROR(CheckOutput(spec, context.file));
  }

  absl::StatusOr<data::Mixture> data =
      ResolveData(job.model, context.file, spec);
  if (!data.ok()) return data.status();
  SDP_RETURN_IF_ERROR(ResolveEvaluation(context, job.model.config.vocab, spec));
  if (spec.packing()) {  // the documents' table takes a little memory
    bytes = PlanBytes(spec, job.model, context.logical_cpus,
                      chosen.gpu_memory_bytes);
    if (!bytes.ok()) return Annotate(bytes.status(), context.file);
    job.bytes = *std::move(bytes);
  }
  SDP_RETURN_IF_ERROR(ResolveSteps(*data, context.file, spec));
  SDP_RETURN_IF_ERROR(ResolveSchedule(context.file, spec));
  SDP_RETURN_IF_ERROR(ResolveCheckpoints(context.file, job.model.layout, spec));
  AddWarnings(spec, job.warnings);
  spec.set_model_config_json(job.model.config_json);
  job.spec = std::move(spec);
  return job;
}

}  // namespace slidedp::ctl
