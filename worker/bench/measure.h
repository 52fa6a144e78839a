// Times of ops, and this device's ceilings of the same run.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/bench/machine.h"
#include "worker/bench/op_list.h"

namespace slidedp::bench {

struct TimedOp {
  const Op* op;
  double seconds;

  double tflops() const { return op->flops / seconds * 1e-12; }
  double gigabytes_per_second() const { return op->bytes / seconds * 1e-9; }
};

// Each op in turn. Call after the warm-up.
absl::StatusOr<std::vector<TimedOp>> TimeOps(Machine& machine,
                                             const std::vector<Op>& ops);

// TFLOP/s of the fastest matrix product; 0 without any.
double BestGemmTflops(const std::vector<TimedOp>& timed);
// Bytes read and written by a copy within device memory, GB/s.
absl::StatusOr<double> CopyGigabytesPerSecond(Machine& machine,
                                              uint64_t copy_bytes);

}  // namespace slidedp::bench
