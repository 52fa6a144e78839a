// slidedpctl bench: trains a published shape from random weights on random
// tokens through real daemon and workers, and says how fast.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hostd/ctl/commands.h"

namespace slidedp::ctl {

struct BenchOptions {
  std::string model;   // name of a published shape
  int64_t layers = 0;  // 0: the shape's; fewer or more of the same
  int64_t vocab = 0;   // 0: the shape's
  uint32_t ranks = 1;
  uint64_t sequence_length = 4096;
  uint64_t micro_batch_size = 1;
  uint64_t batch_size = 0;  // all ranks; 0: one micro-batch on each
  uint64_t steps = 10;      // measured
  uint64_t warmup = 3;      // before them
  double gpu_memory_limit_gib = 0;
  std::string device = "auto";
  std::vector<std::string> keys;  // --keep and the like, as KEY=VALUE
  std::vector<std::string> sets;  // any other key of a job file
  std::string json_file;          // one object; empty: none
  bool compute_only = false;      // the reference alone
  bool reference = false;         // the reference too, and the excess over it
  bool recompute = false;         // the reference keeps layer inputs only
};

ExitCode Bench(const Context& context, const BenchOptions& options);

}  // namespace slidedp::ctl
