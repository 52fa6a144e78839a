#include "worker/bench/commands.h"

#include "common/base/status.h"
#include "common/model/shapes.h"
#include "policy/gpu_memory.h"

namespace slidedp::bench {

absl::StatusOr<model::ModelConfig> ConfigOf(const Options& options) {
  SDP_ASSIGN_OR_RETURN(model::Shape shape, model::FindShape(options.model));
  if (options.layers > 0) shape.layers = options.layers;
  if (options.vocab > 0) shape.vocab = options.vocab;
  shape.max_position = std::max(shape.max_position, options.sequence);
  return model::ParseModelConfig(model::ConfigJson(shape), options.model);
}

absl::StatusOr<policy::Plan> PlanOf(const Options& options,
                                    const model::ModelConfig& config,
                                    Machine& machine,
                                    std::optional<int> kept_layers) {
  policy::Problem problem;
  problem.config = config;
  problem.device =
      machine.is_gpu() ? policy::DeviceKind::kCuda : policy::DeviceKind::kCpu;
  problem.logical_cpus = options.machine.threads;
  problem.sequence_length = options.sequence;
  problem.batch_size = options.micro_batch_size * options.micro_batches;
  problem.micro_batch_size = options.micro_batch_size;
  problem.clipping = false;
  problem.window_slots = static_cast<int>(config.layers);
  problem.head_chunk_tokens = options.head_chunk_tokens;
  problem.compute_threads = options.machine.threads;
  problem.kept_layers = kept_layers;
  problem.offload_permille = {0};
  problem.deterministic = options.machine.deterministic;
  if (machine.is_gpu()) {
    problem.gpu_memory_limit_bytes = static_cast<uint64_t>(
        options.machine.gpu_memory_limit_gib * (uint64_t{1} << 30));
    SDP_ASSIGN_OR_RETURN(const uint64_t gpu_bytes, machine.memory_bytes());
    SDP_ASSIGN_OR_RETURN(problem.device_memory_bytes,
                         policy::GpuBufferBytes(problem, gpu_bytes));
  }
  return policy::MakePlan(problem);
}

std::string TargetOf(const std::string& bench) {
  if (bench == "layer-qwen3-8b") return "<= 1.087";
  if (bench == "loss-head-151936") return ">= 0.85";
  if (bench == "loss-head-151936-memory") return "< 1.5";
  if (bench == "compute-only-qwen3-8b") return ">= 620";
  if (bench == "compute-only-qwen3-8b-recompute") return ">= 470";
  return "";
}

Json DetailOf(const Options& options, const model::ModelConfig& config,
              const Machine& machine) {
  return Json{{"device", machine.name()},
              {"model", options.model},
              {"layers", config.layers},
              {"vocab", config.vocab},
              {"sequence_length", options.sequence},
              {"micro_batch_size", options.micro_batch_size},
              {"deterministic", options.machine.deterministic}};
}

}  // namespace slidedp::bench
