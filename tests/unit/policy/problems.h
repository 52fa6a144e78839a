// Planning problems that the tests of policy share.
#pragma once

#include <string>
#include <vector>

#include "policy/gpu_memory.h"
#include "policy/plan.h"
#include "tests/testing/tiny_model.h"

namespace slidedp::policy {

inline Problem TinyProblem(int ranks, bool tied = false) {
  testing::TinyModelOptions options;
  options.tied = tied;
  Problem problem;
  problem.config = testing::TinyConfig(options);
  problem.ranks = ranks;
  problem.sequence_length = 32;
  problem.batch_size = 4;
  problem.micro_batch_size = 1;
  return problem;
}

// The published sizes of Qwen3-8B; a micro-batch of 8 x 4096.
inline Problem LargeProblem() {
  Problem problem;
  model::ModelConfig& c = problem.config;
  c = testing::TinyConfig({});
  c.hidden = 4096;
  c.layers = 36;
  c.heads = 32;
  c.kv_heads = 8;
  c.head_dim = 128;
  c.intermediate = 12288;
  c.vocab = 151936;
  c.window.assign(36, 0);
  problem.device = DeviceKind::kCuda;
  problem.sequence_length = 4096;
  problem.batch_size = problem.micro_batch_size = 8;
  return problem;
}

inline uint64_t Bytes(const std::vector<NamedBytes>& buffers,
                      const std::string& name) {
  for (const NamedBytes& b : buffers) {
    if (b.name == name) return b.bytes;
  }
  return 0;
}

inline uint64_t Needed(const Problem& problem, const Plan& plan) {
  return GpuBytes(DeviceBuffers(problem.config,
                                model::MakeStateLayout(problem.config), plan));
}

}  // namespace slidedp::policy
