#include "hostd/update/gradients.h"

namespace slidedp::hostd {
namespace {

template <typename G>
double SumOfSquares(const G* g, uint64_t count) {
  constexpr int kLanes = 8;  // independent chains of additions
  double lanes[kLanes] = {};
  uint64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const double x = ToFloat(g[i + lane]);
      lanes[lane] += x * x;
    }
  }
  for (; i < count; ++i) {
    const double x = ToFloat(g[i]);
    lanes[i % kLanes] += x * x;
  }
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return sum;
}

}  // namespace

void SumGradients(std::span<const bf16* const> sources, uint64_t first,
                  uint64_t count, float* out) {
  const bf16* source = sources[0] + first;
  for (uint64_t i = 0; i < count; ++i) out[i] = Bf16ToFloat(source[i]);
  for (size_t s = 1; s < sources.size(); ++s) {
    source = sources[s] + first;
    for (uint64_t i = 0; i < count; ++i) out[i] += Bf16ToFloat(source[i]);
  }
}

double SquareNorm(const bf16* g, uint64_t count) {
  return SumOfSquares(g, count);
}

double SquareNorm(const float* g, uint64_t count) {
  return SumOfSquares(g, count);
}

}  // namespace slidedp::hostd
