#include "common/collective/sum.h"

#include <algorithm>

#include "common/base/bf16.h"

namespace slidedp::collective {
namespace {

// Stays in the first-level cache while the ranks are added.
constexpr size_t kBlock = 2048;

float ToFloat(float x) { return x; }
float ToFloat(bf16 x) { return Bf16ToFloat(x); }
void Store(float sum, float* out) { *out = sum; }
void Store(float sum, bf16* out) { *out = FloatToBf16Even(sum); }

template <typename T>
void Sum(std::span<const void* const> inputs, size_t count, T* out) {
  alignas(64) float sum[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t length = std::min(kBlock, count - begin);
    const T* first = static_cast<const T*>(inputs[0]) + begin;
    for (size_t i = 0; i < length; ++i) sum[i] = ToFloat(first[i]);
    for (const void* input : inputs.subspan(1)) {
      const T* next = static_cast<const T*>(input) + begin;
      for (size_t i = 0; i < length; ++i) sum[i] += ToFloat(next[i]);
    }
    for (size_t i = 0; i < length; ++i) Store(sum[i], out + begin + i);
  }
}

}  // namespace

void SumInRankOrder(std::span<const void* const> inputs, DType dtype,
                    size_t count, void* out) {
  if (dtype == DType::kF32) {
    Sum(inputs, count, static_cast<float*>(out));
  } else {
    Sum(inputs, count, static_cast<bf16*>(out));
  }
}

}  // namespace slidedp::collective
