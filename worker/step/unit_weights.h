// Where a unit's tensors lie in its slot and in its accumulator.
#pragma once

#include "common/base/bf16.h"
#include "common/model/layout.h"

namespace slidedp::step {

// `weights` in a window slot, `gradients` in an accumulator (null in forward).
// A group's first tensor stands for the whole group: Q for q, k, v; Gate for
// gate and up.
class UnitWeights {
 public:
  UnitWeights(const model::Unit& unit, const bf16* weights, float* gradients)
      : unit_(unit), weights_(weights), gradients_(gradients) {}

  // Null if the unit has no such tensor.
  const bf16* w(model::Role role) const {
    return unit_.has(role) ? weights_ + unit_.tensor(role).offset : nullptr;
  }
  float* d(model::Role role) const {
    return unit_.has(role) && gradients_ != nullptr
               ? gradients_ + unit_.tensor(role).offset
               : nullptr;
  }

 private:
  const model::Unit& unit_;
  const bf16* weights_;
  float* gradients_;
};

}  // namespace slidedp::step
