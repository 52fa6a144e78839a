// Loops over a row in vectors, shared by the simd_*.cc files. Included once per
// SIMD target (no include guard in the usual form).
#if defined(SLIDEDP_OPS_SIMD_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLIDEDP_OPS_SIMD_ROWS_INL_H_
#undef SLIDEDP_OPS_SIMD_ROWS_INL_H_
#else
#define SLIDEDP_OPS_SIMD_ROWS_INL_H_
#endif

#include <cstddef>

#include "common/base/bf16.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace slidedp::ops::simd {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// One float32 lane for each float64 lane of a full vector.
using DoubleTag = hn::ScalableTag<double>;
using HalfFloatTag = hn::Rebind<float, DoubleTag>;

// body(tag, i) for whole vectors, then for the single elements that remain.
template <class Tag, class Body>
HWY_INLINE void ForVectors(Tag tag, size_t n, Body body) {
  const size_t lanes = hn::Lanes(tag);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) body(tag, i);
  const hn::CappedTag<hn::TFromD<Tag>, 1> one;
  for (; i < n; ++i) body(one, i);
}

template <class Body>
HWY_INLINE void ForFloats(size_t n, Body body) {
  ForVectors(hn::ScalableTag<float>(), n, body);
}

// Sum over i of term(double tag, i): four running sums, so that the adds do not
// wait for each other.
template <class Term>
HWY_INLINE double SumDoubles(size_t n, Term term) {
  const DoubleTag d;
  const size_t lanes = hn::Lanes(d);
  auto sum0 = hn::Zero(d), sum1 = sum0, sum2 = sum0, sum3 = sum0;
  size_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    sum0 = hn::Add(sum0, term(d, i));
    sum1 = hn::Add(sum1, term(d, i + lanes));
    sum2 = hn::Add(sum2, term(d, i + 2 * lanes));
    sum3 = hn::Add(sum3, term(d, i + 3 * lanes));
  }
  for (; i + lanes <= n; i += lanes) sum0 = hn::Add(sum0, term(d, i));
  const auto sum = hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3));
  double total = hn::GetLane(hn::SumOfLanes(d, sum));
  const hn::CappedTag<double, 1> one;
  for (; i < n; ++i) total += hn::GetLane(term(one, i));
  return total;
}

// Loads as many floats as `d` has doubles.
template <class D>
HWY_INLINE hn::Vec<D> LoadDouble(D d, const float* x) {
  return hn::PromoteTo(d, hn::LoadU(hn::Rebind<float, D>(), x));
}

template <class D>
HWY_INLINE hn::Vec<D> LoadBf16(D d, const bf16* x) {
  const hn::Rebind<uint32_t, D> du32;
  const auto bits =
      hn::PromoteTo(du32, hn::LoadU(hn::Rebind<uint16_t, D>(), x));
  return hn::BitCast(d, hn::ShiftLeft<16>(bits));
}

}  // namespace HWY_NAMESPACE
}  // namespace slidedp::ops::simd
HWY_AFTER_NAMESPACE();

#endif  // per target
