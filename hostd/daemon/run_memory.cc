#include "hostd/daemon/run_memory.h"

#include "proto/identity.h"

namespace slidedp::hostd {

RunMemory::RunMemory(const v1::JobSpec& spec)
    : held_out_(HeldOutIdentity(spec)),
      losses_(spec.loss_spike_sigma()),
      early_stop_(spec.early_stop().patience(), spec.early_stop().min_delta()) {
}

void RunMemory::Remember(uint64_t place) {
  checkpoint::Memory memory;
  memory.losses.assign(losses_.last().begin(), losses_.last().end());
  memory.skipped_in_a_row = skipped_in_a_row_;
  memory.held_out = held_out_;
  early_stop_.Save(memory);
  pasts_.emplace_back(place, std::move(memory));
  if (pasts_.size() > kPasts) pasts_.pop_front();
}

std::optional<LossWatch::Spike> RunMemory::AddStep(const StepResult& result) {
  // One without tokens says nothing.
  if (result.not_finite) {
    ++skipped_in_a_row_;
  } else if (!result.skipped) {
    skipped_in_a_row_ = 0;
  }
  const auto spike = result.skipped ? std::nullopt : losses_.Add(result.loss);
  Remember(2 * (result.step + 1));
  return spike;
}

bool RunMemory::AddEvaluation(uint64_t step, double loss) {
  const bool best = early_stop_.Add(step, loss);
  Remember(2 * step + 1);
  return best;
}

std::optional<checkpoint::Memory> RunMemory::After(uint64_t step) const {
  for (const auto& [place, memory] : pasts_) {
    if (place == 2 * step) return memory;
  }
  return std::nullopt;
}

bool RunMemory::Begin(uint64_t step, const checkpoint::Memory& memory) {
  for (double loss : memory.losses) losses_.Add(loss);
  skipped_in_a_row_ = memory.skipped_in_a_row;
  const bool same =
      memory.held_out == held_out_ || !memory.best_loss.has_value();
  if (same) early_stop_.Restore(memory);
  Remember(2 * step);
  return same;
}

}  // namespace slidedp::hostd
