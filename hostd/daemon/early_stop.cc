#include "hostd/daemon/early_stop.h"

#include <cmath>

namespace slidedp::hostd {

bool EarlyStop::Add(uint64_t step, double loss) {
  const bool finite = std::isfinite(loss);
  if (finite && (!mark_ || loss < *mark_ - min_delta_)) {
    mark_ = loss;
    since_ = 0;
  } else {
    ++since_;
  }
  if (!finite || (best_loss_ && loss >= *best_loss_)) return false;
  best_loss_ = loss;
  best_step_ = step;
  return true;
}

void EarlyStop::Save(checkpoint::Memory& memory) const {
  memory.best_loss = best_loss_;
  memory.best_step = best_step_;
  memory.mark = mark_;
  memory.since_better = since_;
}

void EarlyStop::Restore(const checkpoint::Memory& memory) {
  best_loss_ = memory.best_loss;
  best_step_ = memory.best_step;
  mark_ = memory.mark;
  since_ = memory.since_better;
}

}  // namespace slidedp::hostd
