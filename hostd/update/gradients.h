// Sums and norms of gradients on the host (`cpu` route). Both have a fixed
// order of additions, so results don't depend on threads or chunk sizes.
#pragma once

#include <cstdint>
#include <span>

#include "common/base/bf16.h"

namespace slidedp::hostd {

// out[i] = sources[0][first + i] + sources[1][first + i] + ... in float32.
void SumGradients(std::span<const bf16* const> sources, uint64_t first,
                  uint64_t count, float* out);

// Sum of squares in double.
double SquareNorm(const bf16* g, uint64_t count);
double SquareNorm(const float* g, uint64_t count);

// Elements that workers take at a time when they sum; also the blocks, from the
// unit's start, that the norm of a reduced unit is made of.
inline constexpr uint64_t kSumElements = 4096;
inline constexpr uint64_t kNormBlockElements = uint64_t{1} << 16;

}  // namespace slidedp::hostd
