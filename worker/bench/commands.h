// The subcommands of slidedp-bench-ops. Each makes its own machine, measures,
// and reports one line or more.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "common/model/config.h"
#include "policy/plan.h"
#include "worker/bench/machine.h"
#include "worker/bench/record.h"

namespace slidedp::bench {

struct Options {
  std::string model = "qwen3-8b";  // a published shape
  int64_t layers = 0;              // 0: the shape's
  int64_t vocab = 0;               // 0: the shape's
  int64_t sequence = 4096;
  int64_t micro_batch_size = 8;   // sequences
  int64_t micro_batches = 1;      // of a step
  int64_t head_chunk_tokens = 0;  // 0: the plan's
  uint64_t steps = 5;             // measured
  uint64_t warmup = 2;
  bool recompute = false;  // keep only the layers' inputs
  MachineOptions machine;
  Origin origin;
};

// Every op alone: time, TFLOP/s or GB/s, and the share of what this run
// measures as the device's best: its fastest large matrix product, or a copy
// from device memory to device memory.
absl::Status RunOps(const Options& options);
// A decoder layer, forward and backward, against its matrix products and
// attention alone.
absl::Status RunLayer(const Options& options);
// Final norm, projection and cross-entropy, forward and backward.
absl::Status RunHead(const Options& options);
// Whole steps of a model that is resident: no host traffic, no update.
absl::Status RunStep(const Options& options);

// ---- Shared by them ----

// The shape's config, with the options' changes.
absl::StatusOr<model::ModelConfig> ConfigOf(const Options& options);
// One rank's plan that holds every layer in its window. `kept_layers`: as in
// policy::Problem, fitted to the GPU's memory if unset.
absl::StatusOr<policy::Plan> PlanOf(const Options& options,
                                    const model::ModelConfig& config,
                                    Machine& machine,
                                    std::optional<int> kept_layers);
// What the project wants of a figure; empty: nothing.
std::string TargetOf(const std::string& bench);
// What every result's detail begins with.
Json DetailOf(const Options& options, const model::ModelConfig& config,
              const Machine& machine);

}  // namespace slidedp::bench
