#include "hostd/daemon/step_measures.h"

#include "hostd/daemon/log_lines.h"

namespace slidedp::hostd {

v1::StepRecord StepMeasures::Next(const StepResult& result) {
  v1::StepRecord record;
  record.set_step(result.step + 1);
  record.set_loss(result.loss);
  record.set_grad_norm(result.grad_norm);
  record.set_clip_coefficient(result.clip_coefficient);
  record.set_lr(result.lr);
  record.set_valid_tokens(result.valid_tokens);
  record.set_tokens(job_.tokens);
  record.set_seconds(static_cast<double>(result.end_ns - result.begin_ns) *
                     1e-9);
  record.set_skipped(result.skipped);
  record.set_skip_reason(ToValidUtf8(result.skip_reason));
  record.set_deliver_ns(result.deliver_ns);
  record.set_compute_ns(result.compute_ns);
  record.set_reduce_ns(result.reduce_ns);
  record.set_drain_ns(result.drain_ns);
  record.set_stall_ns(result.stall_ns);
  record.set_offload_ns(result.offload_ns);
  record.set_offload_wait_ns(result.offload_wait_ns);
  record.set_update_ns(result.update_ns);
  record.set_end_ns(result.end_ns);
  const int64_t since_ns = last_end_ns_ != 0 ? last_end_ns_ : result.begin_ns;
  last_end_ns_ = result.end_ns;
  const double seconds = static_cast<double>(result.end_ns - since_ns) * 1e-9;
  if (!(seconds > 0)) return record;
  record.set_tokens_per_second(static_cast<double>(job_.tokens) / seconds);
  if (job_.flops > 0 && job_.peak_flops_per_second > 0) {
    record.set_mfu(job_.flops / seconds / job_.peak_flops_per_second);
  }
  return record;
}

}  // namespace slidedp::hostd
