// The one summation that all operations of the shared-memory collective use.
#pragma once

#include <cstddef>
#include <span>

#include "common/collective/collective.h"

namespace slidedp::collective {

// out[i] = inputs[0][i] + inputs[1][i] + ... in float32 and in that order, in
// elements of `dtype`; BF16 is rounded once, to even. `out` may be one of the
// inputs.
void SumInRankOrder(std::span<const void* const> inputs, DType dtype,
                    size_t count, void* out);

}  // namespace slidedp::collective
