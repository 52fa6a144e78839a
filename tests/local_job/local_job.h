// A job inside one process: the real host state, update engine, collectives and
// trainers (a thread per rank), without daemon, sockets or processes. What
// property tests, the thread sanitizer and the golden probe run. On a GPU, one
// rank.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/device/device.h"
#include "common/model/tensor_rules.h"
#include "hostd/store/host_state.h"
#include "hostd/update/engine.h"
#include "policy/plan.h"
#include "worker/data/sequence_table.h"
#include "worker/ops/ops.h"
#include "worker/step/trainer.h"

namespace slidedp::testing {

struct LocalJobOptions {
  std::string model;  // folder
  std::string data;   // dataset file
  data::SequenceOptions sequences;
  // Its config and documents are filled in from `model` and `data`.
  policy::Problem problem;
  model::TensorRules rules;
  hostd::UpdateConfig update;
  uint64_t steps = 1;
  uint64_t seed = 0;
  // Sequences of the data have a token more than those of the problem: the last
  // one is a label only. So every position has a label, even with sequences of
  // one token.
  bool label_every_position = false;
  // Evaluations of the first so many sequences of another dataset; 0: none.
  std::string eval_data;
  uint64_t eval_sequences = 0, eval_every_steps = 0;
  // The job ends at the evaluation after so many steps.
  std::optional<uint64_t> stop_at_evaluation;
  // Of rank 0; on_batch is taken if label_every_position.
  step::Hooks hooks;
  // What stands between a CPU rank and its device; empty: nothing.
  std::function<std::unique_ptr<device::Device>(
      std::unique_ptr<device::Device>)>
      wrap_device;
  // The same of its ops.
  std::function<std::unique_ptr<ops::Ops>(std::unique_ptr<ops::Ops>)> wrap_ops;
  // CPU ranks rehearse their step first, as GPUs do.
  bool rehearse = false;
  // Run the update engine. Without it, only one step can be run.
  bool apply_updates = true;
};

struct LocalJobResult {
  policy::Plan plan;
  model::StateLayout layout;
  std::vector<hostd::StepResult> steps;
  // Loss after so many steps.
  std::vector<std::pair<uint64_t, double>> evaluations;
  // Master weights, StateLayout::plane_elements long.
  std::vector<float> master;
};

absl::StatusOr<LocalJobResult> RunLocalJob(const LocalJobOptions& options);

}  // namespace slidedp::testing
