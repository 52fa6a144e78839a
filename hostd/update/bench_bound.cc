#include "hostd/update/bench_bound.h"

#include <cstdint>

#include "hostd/store/split.h"
#include "hostd/update/prefetch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "hostd/update/bench_bound.cc"
#include "hwy/foreach_target.h"
// foreach_target.h comes first, by Highway's rule.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace slidedp::hostd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

void Touch(const PlaneSpan& planes, const bf16* gradient, uint16_t none) {
  const hn::ScalableTag<float> df;
  const hn::Rebind<uint16_t, decltype(df)> du16;
  const hn::Rebind<int16_t, decltype(df)> di16;
  const size_t lanes = hn::Lanes(df);
  const auto mask = hn::Set(du16, none);
  const auto zero = hn::Set(df, static_cast<float>(none));
  uint64_t i = 0;
  for (; i + lanes <= planes.count; i += lanes) {
    // As the update asks for it.
    PrefetchPlanes(planes, i);
    PrefetchGradient(gradient, i);
    const auto g = hn::And(hn::LoadU(du16, gradient + i), mask);
    hn::StoreU(hn::Xor(hn::LoadU(du16, planes.hi + i), g), du16, planes.hi + i);
    hn::StoreU(hn::Xor(hn::LoadU(di16, planes.lo + i), hn::BitCast(di16, g)),
               di16, planes.lo + i);
    const auto m = hn::LoadU(df, planes.m + i);
    const auto v = hn::LoadU(df, planes.v + i);
    hn::StoreU(hn::Add(hn::Mul(v, zero), m), df, planes.m + i);
    hn::StoreU(hn::Add(hn::Mul(m, zero), v), df, planes.v + i);
  }
  for (; i < planes.count; ++i) {
    const bf16 g = gradient[i] & none;
    const float m = planes.m[i];
    planes.hi[i] ^= g;
    planes.lo[i] ^= static_cast<int16_t>(g);
    planes.m[i] += planes.v[i] * static_cast<float>(none);
    planes.v[i] += m * static_cast<float>(none);
  }
}

}  // namespace slidedp::hostd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slidedp::hostd {

HWY_EXPORT(Touch);

void TouchPlanes(const PlaneSpan& planes, const bf16* gradient) {
  // A zero that the compiler doesn't know: the values stay as they are.
  static const volatile uint16_t none = 0;
  HWY_DYNAMIC_DISPATCH(Touch)(planes, gradient, none);
}

void FillPlanes(const PlaneSpan& planes, bf16* gradient) {
  for (uint64_t i = 0; i < planes.count; ++i) {
    const float x = static_cast<float>(i % 251) - 125.0f;
    SplitFloat(x * 1e-3f, planes.hi[i], planes.lo[i]);
    planes.m[i] = x * 1e-5f;
    planes.v[i] = x * x * 1e-10f + 1e-12f;
    gradient[i] = FloatToBf16Even(x * 1e-4f);
  }
}

}  // namespace slidedp::hostd
#endif  // HWY_ONCE
