// slidedpctl estimate and plan: what a job would get, without a daemon.
#include <filesystem>
#include <optional>

#include "absl/strings/str_cat.h"
#include "common/base/fd.h"
#include "common/base/units.h"
#include "hostd/ctl/commands.h"
#include "hostd/ctl/estimate.h"
#include "hostd/ctl/job_file.h"
#include "hostd/ctl/plan_file.h"
#include "hostd/ctl/resolve.h"
#include "hostd/ctl/yaml_tree.h"

namespace slidedp::ctl {
namespace {

// The estimate, or how the verb ends.
struct Outcome {
  std::optional<Estimate> estimate;
  ExitCode code = kExitOk;
};

Outcome EstimateOf(const Context& context, const char* verb,
                   const EstimateOptions& options) {
  const Environment& environment = context.environment;
  const auto fail = [&context](ExitCode code, absl::string_view message) {
    return Outcome{std::nullopt, context.Fail(code, message)};
  };
  std::vector<std::string> sets = options.keys;
  sets.insert(sets.end(), options.sets.begin(), options.sets.end());
  const std::string source =
      AbsolutePath(options.source, environment.current_folder);
  std::string text = "{}", file = verb, model = source;
  if (std::error_code error; std::filesystem::is_regular_file(source, error)) {
    absl::StatusOr<std::string> read = ReadFile(source, kMaxYamlBytes);
    if (!read.ok()) return fail(kExitFailure, read.status().message());
    text = *std::move(read);
    file = options.source;
    model.clear();
  }
  absl::StatusOr<v1::JobSpec> spec = ParseJobFile(text, file, sets);
  if (!spec.ok()) return fail(kExitUsage, spec.status().message());
  if (model.empty()) {
    if (spec->model().empty()) {
      return fail(kExitFailure, absl::StrCat(file, ": model: is required"));
    }
    model = AbsolutePath(spec->model(), environment.current_folder);
  }
  for (v1::DataSource& source : *spec->mutable_sources()) {
    source.set_path(AbsolutePath(source.path(), environment.current_folder));
  }
  if (!spec->plan().empty()) {
    spec->set_plan(AbsolutePath(spec->plan(), environment.current_folder));
  }
  uint64_t gpu_memory_bytes =
      static_cast<uint64_t>(options.gpu_memory_gib * static_cast<double>(kGiB));
  if (gpu_memory_bytes == 0) {
    // What would be there, not whether it is enough.
    absl::StatusOr<ChosenDevice> chosen =
        ChooseDevice(spec->device(), /*ranks=*/0, verb, environment.find_gpus);
    if (!chosen.ok()) {
      return fail(
          kExitFailure,
          absl::StrCat(chosen.status().message(),
                       "; --gpu-memory GIB estimates for another host"));
    }
    spec->set_device(chosen->device);
    gpu_memory_bytes = chosen->gpu_memory_bytes;
  } else if (spec->device() == v1::DEVICE_KIND_CPU) {
    return fail(
        kExitUsage,
        absl::StrCat(verb, ": --gpu-memory is of no use with device cpu"));
  } else {
    spec->set_device(v1::DEVICE_KIND_CUDA);
  }
  absl::StatusOr<Estimate> estimate = MakeEstimate(
      model, *std::move(spec), environment.logical_cpus, gpu_memory_bytes);
  if (!estimate.ok()) {
    return fail(kExitFailure, estimate.status().message());
  }
  return Outcome{*std::move(estimate), kExitOk};
}

}  // namespace

ExitCode EstimateModel(const Context& context, const EstimateOptions& options) {
  const Outcome outcome = EstimateOf(context, "estimate", options);
  if (!outcome.estimate) return outcome.code;
  const Estimate& estimate = *outcome.estimate;
  if (context.json()) {
    context.out() << ToText(JsonEstimate(estimate)) << "\n";
  } else if (context.output == Output::kName) {
    for (const policy::NamedBytes& part : estimate.bytes.host) {
      context.out() << part.name << "\n";
    }
  } else {
    PrintEstimate(estimate, context.headers, context.output == Output::kWide,
                  context.color, context.out());
  }
  return kExitOk;
}

ExitCode PrintPlan(const Context& context, const EstimateOptions& options) {
  const Outcome outcome = EstimateOf(context, "plan", options);
  if (!outcome.estimate) return outcome.code;
  const policy::Plan& plan = outcome.estimate->bytes.plan;
  if (context.json()) {
    context.out() << ToText(JsonPlanFile(plan)) << "\n";
    return kExitOk;
  }
  PrintPlanFile(
      plan,
      absl::StrCat(outcome.estimate->model, ", ", plan.ranks,
                   plan.ranks == 1 ? " rank, " : " ranks, ", plan.micro_batches,
                   " micro-batches of ", plan.micro_batch_size, " x ",
                   plan.sequence_length, " tokens each"),
      context.out());
  return kExitOk;
}

}  // namespace slidedp::ctl
