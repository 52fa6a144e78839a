#include "worker/bench/measure.h"

#include <algorithm>

#include "common/base/status.h"

namespace slidedp::bench {

absl::StatusOr<std::vector<TimedOp>> TimeOps(Machine& machine,
                                             const std::vector<Op>& ops) {
  std::vector<TimedOp> timed;
  for (const Op& op : ops) {
    absl::StatusOr<double> seconds = machine.Seconds(op.work);
    if (!seconds.ok()) return Annotate(seconds.status(), op.name);
    timed.push_back({&op, *seconds});
  }
  return timed;
}

double BestGemmTflops(const std::vector<TimedOp>& timed) {
  double best = 0;
  for (const TimedOp& op : timed) {
    if (op.op->kind == OpKind::kGemm) best = std::max(best, op.tflops());
  }
  return best;
}

absl::StatusOr<double> CopyGigabytesPerSecond(Machine& machine,
                                              uint64_t copy_bytes) {
  SDP_ASSIGN_OR_RETURN(void* from, machine.Zeros("copy.from", copy_bytes));
  SDP_ASSIGN_OR_RETURN(void* to, machine.Zeros("copy.to", copy_bytes));
  SDP_ASSIGN_OR_RETURN(const double seconds, machine.Seconds([&] {
    return machine.device().Copy(to, from, copy_bytes, machine.stream());
  }));
  return 2.0 * static_cast<double>(copy_bytes) / seconds * 1e-9;
}

}  // namespace slidedp::bench
