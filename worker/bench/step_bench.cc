#include <algorithm>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/status.h"
#include "common/model/layout.h"
#include "common/model/shapes.h"
#include "worker/bench/commands.h"
#include "worker/ops/accelerator_ops.h"
#include "worker/step/trainer.h"

namespace slidedp::bench {
namespace {

constexpr uint64_t kSeed = 1234;

// As transformers initialises: norms 1, biases 0.
absl::Status FillWeights(Machine& machine, const model::Unit& unit,
                         bf16* weights) {
  for (const model::Tensor& tensor : unit.tensors) {
    bf16* data = weights + tensor.offset;
    if (tensor.decay) {
      SDP_RETURN_IF_ERROR(
          machine.FillNormal(data, tensor.count, true, kWeightDeviation));
    } else if (!absl::EndsWith(tensor.name, ".bias")) {
      SDP_RETURN_IF_ERROR(machine.FillOnes(data, tensor.count));
    }
  }
  return absl::OkStatus();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half]
                                : (values[half - 1] + values[half]) / 2;
}

}  // namespace

absl::Status RunStep(const Options& options) {
  SDP_ASSIGN_OR_RETURN(const model::ModelConfig config, ConfigOf(options));
  const model::StateLayout layout = model::MakeStateLayout(config);
  SDP_ASSIGN_OR_RETURN(const std::unique_ptr<Machine> machine,
                       Machine::Create(options.machine));
  Machine& m = *machine;
  // Host memory is no less than a device's: a CPU keeps all.
  std::optional<int> kept;
  if (options.recompute) {
    kept = 0;
  } else if (!m.is_gpu()) {
    kept = static_cast<int>(config.layers);
  }
  SDP_ASSIGN_OR_RETURN(const policy::Plan plan,
                       PlanOf(options, config, m, kept));
  step::TrainerInputs inputs;
  inputs.device = &m.device();
  inputs.ops = &m.ops();
  inputs.config = &config;
  inputs.layout = &layout;
  inputs.plan = &plan;
  inputs.seed = kSeed;
  inputs.batch.batch_size = options.micro_batch_size * options.micro_batches;
  inputs.batch.micro_batch_size = options.micro_batch_size;
  inputs.batch.micro_batches = options.micro_batches;
  inputs.compute_only = true;
  inputs.fill_weights = [&m, &layout](int unit, bf16* weights) {
    return FillWeights(m, layout.units[unit], weights);
  };
  if (m.is_gpu()) {
    inputs.warm_up = [&m](const std::function<absl::Status()>& rehearsal) {
      return m.WarmUp(rehearsal);
    };
    inputs.ops_workspace_bytes = [&m] { return m.workspace_bytes(); };
  }
  SDP_ASSIGN_OR_RETURN(const std::unique_ptr<step::Trainer> trainer,
                       step::Trainer::Create(inputs));
  // One step at a time before the measured ones, which then follow each other.
  const uint64_t warmup = std::max<uint64_t>(1, options.warmup);
  for (uint64_t step = 0; step < warmup; ++step) {
    SDP_RETURN_IF_ERROR(trainer->Run(step, 1));
  }
  SDP_RETURN_IF_ERROR(trainer->Run(warmup, options.steps));
  const std::vector<step::ComputeTimes>& times = trainer->compute_times();
  if (times.size() != warmup + options.steps) {
    return absl::InternalError(absl::StrCat(times.size(), " steps were timed"));
  }
  // The first follows a pause; from then on a step lasts from end to end.
  std::vector<double> seconds, busy;
  for (uint64_t i = warmup; i < times.size(); ++i) {
    const double of_compute =
        static_cast<double>(times[i].busy_ns + times[i].stall_ns) * 1e-9;
    seconds.push_back(i == warmup ? of_compute
                                  : static_cast<double>(times[i].end_ns -
                                                        times[i - 1].end_ns) *
                                        1e-9);
    busy.push_back(static_cast<double>(times[i].busy_ns) * 1e-9);
  }
  const double step = Median(seconds);
  const double tokens = static_cast<double>(
      options.micro_batch_size * options.micro_batches * options.sequence);
  const model::StepFlops flops =
      model::ModelFlops(config, tokens, static_cast<double>(options.sequence));
  const auto [least, most] =
      std::minmax_element(seconds.begin(), seconds.end());
  Result result;
  result.bench = absl::StrCat("compute-only-", options.model,
                              options.recompute ? "-recompute" : "");
  result.value = flops.total() / step * 1e-12;
  result.unit = "model TFLOP/s";
  result.target = TargetOf(result.bench);
  result.detail = DetailOf(options, config, m);
  result.detail["micro_batches"] = options.micro_batches;
  result.detail["step_seconds"] =
      Json{{"median", step}, {"min", *least}, {"max", *most}, {"all", seconds}};
  result.detail["compute_busy_seconds"] = Median(busy);
  result.detail["tokens_per_second"] = tokens / step;
  result.detail["model_flops_per_step"] = flops.total();
  result.detail["layers_that_recompute_nothing"] =
      std::count(plan.keep.begin(), plan.keep.end(), policy::kKeepAll);
  result.detail["device_bytes"] = trainer->device_bytes();
  return Report(result, options.origin);
}

}  // namespace slidedp::bench
