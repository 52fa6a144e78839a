// Where a unit's tensors lie in its slot and in its accumulator.
#pragma once

#include <initializer_list>

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
  // Also null if it is of a matrix whose group is frozen: its product is left
  // out. Vectors are too small to be worth that.
  float* d(model::Role role) const {
    return unit_.has(role) && gradients_ != nullptr && IsWanted(role)
               ? gradients_ + unit_.tensor(role).offset
               : nullptr;
  }

 private:
  bool IsWanted(model::Role role) const {
    using model::Role;
    switch (role) {
      case Role::kQ:
        return AnyTrained({Role::kQ, Role::kK, Role::kV, Role::kQBias,
                           Role::kKBias, Role::kVBias});
      case Role::kGate:
        return AnyTrained({Role::kGate, Role::kUp});
      case Role::kEmbedding:
      case Role::kO:
      case Role::kDown:
      case Role::kHead:
        return AnyTrained({role});
      default:
        return true;
    }
  }
  bool AnyTrained(std::initializer_list<model::Role> roles) const {
    for (model::Role role : roles) {
      if (unit_.has(role) && !unit_.tensor(role).frozen) return true;
    }
    return false;
  }

  const model::Unit& unit_;
  const bf16* weights_;
  float* gradients_;
};

}  // namespace slidedp::step
