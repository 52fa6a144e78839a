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

}  // namespace slidedp::hostd
