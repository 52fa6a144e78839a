// What needs an exponential: softmax, its gradient, SwiGLU.
#include <limits>

#include "worker/ops/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/ops/simd_exp.cc"
// clang-format off
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "worker/ops/simd_rows-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace slidedp::ops::simd {
namespace HWY_NAMESPACE {

// exp(x) for x <= 0 (a little above is fine), at most 1 ulp off; 0 below -87,
// where the result would leave float32's normal range: subnormal weights would
// slow every product that they meet. NaN stays NaN (hn::Exp gives 0).
//
// exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln 2 / 2; ln 2 in two parts,
// the first short enough for n * part to be exact; exp(r) by the Cephes
// polynomial.
template <class D, class V>
HWY_INLINE V ExpNotPositive(D d, V x) {
  const hn::Rebind<int32_t, D> di;
  // Adding 1.5 * 2^23 leaves n in the low bits.
  const auto shift = hn::Set(d, 12582912.0f);
  const auto shifted = hn::MulAdd(x, hn::Set(d, 1.44269504088896341f), shift);
  const auto n = hn::Sub(shifted, shift);
  auto r = hn::MulAdd(n, hn::Set(d, -0.693359375f), x);
  r = hn::MulAdd(n, hn::Set(d, 2.12194440e-4f), r);
  auto p = hn::Set(d, 1.9875691500e-4f);
  p = hn::MulAdd(p, r, hn::Set(d, 1.3981999507e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 8.3334519073e-3f));
  p = hn::MulAdd(p, r, hn::Set(d, 4.1665795894e-2f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.6666665459e-1f));
  p = hn::MulAdd(p, r, hn::Set(d, 5.0000001201e-1f));
  p = hn::Add(hn::MulAdd(p, hn::Mul(r, r), r), hn::Set(d, 1.0f));
  // p lies in [0.7, 1.5), so the exponent may be added in place.
  const auto scaled = hn::BitCast(
      d,
      hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(hn::BitCast(di, shifted))));
  const auto result = hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.0f)), scaled);
  return hn::IfThenElse(hn::Eq(x, x), result, x);
}

float Max(const float* x, size_t n) {
  const hn::ScalableTag<float> d;
  const float lowest = -std::numeric_limits<float>::infinity();
  const size_t lanes = hn::Lanes(d);
  auto max0 = hn::Set(d, lowest), max1 = max0;
  size_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    max0 = hn::Max(max0, hn::LoadU(d, x + i));
    max1 = hn::Max(max1, hn::LoadU(d, x + i + lanes));
  }
  float max = hn::GetLane(hn::MaxOfLanes(d, hn::Max(max0, max1)));
  for (; i < n; ++i) max = x[i] > max ? x[i] : max;
  return max;
}

double ExpSum(float max, size_t n, float* x) {
  const hn::ScalableTag<float> d;
  const DoubleTag dd;
  const size_t lanes = hn::Lanes(d);
  const auto shift = hn::Set(d, max);
  auto sums = hn::Zero(dd);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    hn::StoreU(ExpNotPositive(d, hn::Sub(hn::LoadU(d, x + i), shift)), d,
               x + i);
    for (size_t part = 0; part < lanes; part += hn::Lanes(dd)) {
      sums = hn::Add(sums, LoadDouble(dd, x + i + part));
    }
  }
  double sum = hn::GetLane(hn::SumOfLanes(dd, sums));
  const hn::CappedTag<float, 1> one;
  for (; i < n; ++i) {
    x[i] = hn::GetLane(ExpNotPositive(one, hn::Set(one, x[i] - max)));
    sum += x[i];
  }
  return sum;
}

void SoftmaxBackward(float lse, float delta, float scale, size_t n,
                     float* scores, float* d_p) {
  ForFloats(n, [&](auto d, size_t i) HWY_ATTR {
    const auto p =
        ExpNotPositive(d, hn::Sub(hn::LoadU(d, scores + i), hn::Set(d, lse)));
    hn::StoreU(p, d, scores + i);
    const auto pull = hn::Sub(hn::LoadU(d, d_p + i), hn::Set(d, delta));
    hn::StoreU(hn::Mul(hn::Mul(p, pull), hn::Set(d, scale)), d, d_p + i);
  });
}

// s = 1 / (1 + exp(-x)) and 1 - s without cancellation, both from exp(-|x|): no
// argument overflows.
template <class D, class V>
HWY_INLINE void Sigmoid(D d, V x, V& s, V& one_minus_s) {
  const auto one = hn::Set(d, 1.0f);
  const auto e = ExpNotPositive(d, hn::Neg(hn::Abs(x)));
  const auto large = hn::Div(one, hn::Add(one, e));
  const auto small = hn::Mul(e, large);
  const auto negative = hn::Lt(x, hn::Zero(d));
  s = hn::IfThenElse(negative, small, large);
  one_minus_s = hn::IfThenElse(negative, large, small);
}

void SwiGlu(const float* gate, const float* up, size_t n, float* out) {
  ForFloats(n, [&](auto d, size_t i) HWY_ATTR {
    const auto g = hn::LoadU(d, gate + i);
    hn::Vec<decltype(d)> s, one_minus_s;
    Sigmoid(d, g, s, one_minus_s);
    const auto silu = hn::Mul(g, s);
    hn::StoreU(hn::Mul(silu, hn::LoadU(d, up + i)), d, out + i);
  });
}

void SwiGluBackward(const float* gate, const float* up, const float* d_out,
                    size_t n, float* d_gate, float* d_up, float* activated) {
  ForFloats(n, [&](auto d, size_t i) HWY_ATTR {
    const auto one = hn::Set(d, 1.0f);
    const auto g = hn::LoadU(d, gate + i), u = hn::LoadU(d, up + i);
    const auto dy = hn::LoadU(d, d_out + i);
    hn::Vec<decltype(d)> s, one_minus_s;
    Sigmoid(d, g, s, one_minus_s);
    // silu'(g) = s (1 + g (1 - s))
    const auto slope = hn::Mul(s, hn::Add(one, hn::Mul(g, one_minus_s)));
    hn::StoreU(hn::Mul(hn::Mul(dy, u), slope), d, d_gate + i);
    const auto silu = hn::Mul(g, s);
    hn::StoreU(hn::Mul(dy, silu), d, d_up + i);
    if (activated != nullptr) hn::StoreU(hn::Mul(silu, u), d, activated + i);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace slidedp::ops::simd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slidedp::ops::simd {

HWY_EXPORT(Max);
HWY_EXPORT(ExpSum);
HWY_EXPORT(SoftmaxBackward);
HWY_EXPORT(SwiGlu);
HWY_EXPORT(SwiGluBackward);

float Max(const float* x, size_t n) { return HWY_DYNAMIC_DISPATCH(Max)(x, n); }
double ExpSum(float max, size_t n, float* x) {
  return HWY_DYNAMIC_DISPATCH(ExpSum)(max, n, x);
}
void SoftmaxBackward(float lse, float delta, float scale, size_t n,
                     float* scores, float* d_p) {
  HWY_DYNAMIC_DISPATCH(SoftmaxBackward)(lse, delta, scale, n, scores, d_p);
}
void SwiGlu(const float* gate, const float* up, size_t n, float* out) {
  HWY_DYNAMIC_DISPATCH(SwiGlu)(gate, up, n, out);
}
void SwiGluBackward(const float* gate, const float* up, const float* d_out,
                    size_t n, float* d_gate, float* d_up, float* activated) {
  HWY_DYNAMIC_DISPATCH(SwiGluBackward)
  (gate, up, d_out, n, d_gate, d_up, activated);
}

}  // namespace slidedp::ops::simd
#endif  // HWY_ONCE
