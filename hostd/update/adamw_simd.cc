// The vector form of AdamW, compiled once for each SIMD target of the
// architecture; the best one that the CPU has is chosen at run time.
#include <cstdint>

#include "common/base/bf16.h"
#include "hostd/update/adamw.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "hostd/update/adamw_simd.cc"
#include "hwy/foreach_target.h"
// foreach_target.h comes first, by Highway's rule.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace slidedp::hostd::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// At most 16 lanes, which bounds the tail's buffers on every architecture.
constexpr size_t kMaxLanes = 16;
using F32 = hn::CappedTag<float, kMaxLanes>;
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using I16 = hn::Rebind<int16_t, F32>;
using U16 = hn::Rebind<uint16_t, F32>;

HWY_INLINE hn::Vec<F32> LoadGradient(const bf16* g) {
  return hn::BitCast(
      F32(), hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(U16(), g))));
}
HWY_INLINE hn::Vec<F32> LoadGradient(const float* g) {
  return hn::LoadU(F32(), g);
}

// Lanes whose magnitude, as a bit pattern, is below `limit`.
HWY_INLINE hn::Mask<I32> Below(hn::Vec<F32> x, int32_t limit) {
  const I32 di;
  return hn::Lt(hn::And(hn::BitCast(di, x), hn::Set(di, 0x7fffffff)),
                hn::Set(di, limit));
}

// One vector at each pointer; the operations of UpdateScalar in its order.
template <typename G>
HWY_INLINE bool UpdateVector(bf16* hi, int16_t* lo, float* m_at, float* v_at,
                             const G* g_at, float factor,
                             const AdamWStep& step) {
  const F32 df;
  const I32 di;
  const U32 du;
  const I16 di16;
  const U16 du16;
  const auto old_bits =
      hn::Add(hn::ShiftLeft<16>(
                  hn::BitCast(di, hn::PromoteTo(du, hn::LoadU(du16, hi)))),
              hn::PromoteTo(di, hn::LoadU(di16, lo)));
  const auto old_m = hn::LoadU(df, m_at);
  const auto old_v = hn::LoadU(df, v_at);

  const auto g = hn::Mul(hn::Set(df, step.grad_scale), LoadGradient(g_at));
  auto p = hn::Mul(hn::BitCast(df, old_bits), hn::Set(df, factor));
  auto m = hn::Add(hn::Mul(hn::Set(df, step.beta1), old_m),
                   hn::Mul(hn::Set(df, step.one_minus_beta1), g));
  auto v = hn::Add(hn::Mul(hn::Set(df, step.beta2), old_v),
                   hn::Mul(hn::Mul(hn::Set(df, step.one_minus_beta2), g), g));
  const auto denominator =
      hn::Add(hn::Div(hn::Sqrt(v), hn::Set(df, step.sqrt_bias_correction2)),
              hn::Set(df, step.eps));
  p = hn::Sub(p, hn::Mul(hn::Set(df, step.step_size), hn::Div(m, denominator)));

  auto bits = hn::BitCast(di, p);
  const auto ok = hn::And(Below(p, 0x7f800000 - 0x8000),  // Splittable
                          hn::And(Below(m, 0x7f800000), Below(v, 0x7f800000)));
  const bool all_ok = hn::AllTrue(di, ok);
  if (HWY_UNLIKELY(!all_ok)) {
    bits = hn::IfThenElse(ok, bits, old_bits);
    const auto ok_float = hn::RebindMask(df, ok);
    m = hn::IfThenElse(ok_float, m, old_m);
    v = hn::IfThenElse(ok_float, v, old_v);
  }
  const auto high =
      hn::ShiftRight<16>(hn::BitCast(du, hn::Add(bits, hn::Set(di, 0x8000))));
  const auto low = hn::Sub(bits, hn::BitCast(di, hn::ShiftLeft<16>(high)));
  // Both fit: high is in [0, 65535] and low in [-32768, 32767].
  hn::StoreU(hn::DemoteTo(du16, hn::BitCast(di, high)), du16, hi);
  hn::StoreU(hn::DemoteTo(di16, low), di16, lo);
  hn::StoreU(m, df, m_at);
  hn::StoreU(v, df, v_at);
  return all_ok;
}

// Fewer elements than a vector: through buffers, so that nothing past the end
// is touched. Spare lanes repeat the last element, so that they are refused
// only if it is.
template <typename G>
HWY_NOINLINE bool UpdateTail(bf16* hi, int16_t* lo, float* m, float* v,
                             const G* g, size_t count, float factor,
                             const AdamWStep& step) {
  bf16 hi_buffer[kMaxLanes];
  int16_t lo_buffer[kMaxLanes];
  float m_buffer[kMaxLanes], v_buffer[kMaxLanes];
  G g_buffer[kMaxLanes];
  for (size_t i = 0; i < kMaxLanes; ++i) {
    const size_t from = i < count ? i : count - 1;
    hi_buffer[i] = hi[from];
    lo_buffer[i] = lo[from];
    m_buffer[i] = m[from];
    v_buffer[i] = v[from];
    g_buffer[i] = g[from];
  }
  const bool ok = UpdateVector(hi_buffer, lo_buffer, m_buffer, v_buffer,
                               g_buffer, factor, step);
  for (size_t i = 0; i < count; ++i) {
    hi[i] = hi_buffer[i];
    lo[i] = lo_buffer[i];
    m[i] = m_buffer[i];
    v[i] = v_buffer[i];
  }
  return ok;
}

template <typename G>
HWY_INLINE bool UpdateRange(const PlaneSpan& planes, const G* g, bool decay,
                            const AdamWStep& step) {
  const size_t lanes = hn::Lanes(F32());
  const float factor = decay ? step.decay_factor : 1.0f;
  bool ok = true;
  uint64_t i = 0;
  for (; i + lanes <= planes.count; i += lanes) {
    ok &= UpdateVector(planes.hi + i, planes.lo + i, planes.m + i, planes.v + i,
                       g + i, factor, step);
  }
  if (i < planes.count) {
    ok &= UpdateTail(planes.hi + i, planes.lo + i, planes.m + i, planes.v + i,
                     g + i, planes.count - i, factor, step);
  }
  return ok;
}

bool UpdateBf16(const PlaneSpan& planes, const bf16* g, bool decay,
                const AdamWStep& step) {
  return UpdateRange(planes, g, decay, step);
}

bool UpdateF32(const PlaneSpan& planes, const float* g, bool decay,
               const AdamWStep& step) {
  return UpdateRange(planes, g, decay, step);
}

const char* TargetName() { return hwy::TargetName(HWY_TARGET); }

}  // namespace slidedp::hostd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slidedp::hostd {

HWY_EXPORT(UpdateBf16);
HWY_EXPORT(UpdateF32);
HWY_EXPORT(TargetName);

bool AdamWUpdate(const PlaneSpan& planes, const bf16* g, bool decay,
                 const AdamWStep& step) {
  return HWY_DYNAMIC_DISPATCH(UpdateBf16)(planes, g, decay, step);
}

bool AdamWUpdate(const PlaneSpan& planes, const float* g, bool decay,
                 const AdamWStep& step) {
  return HWY_DYNAMIC_DISPATCH(UpdateF32)(planes, g, decay, step);
}

const char* AdamWTargetName() { return HWY_DYNAMIC_DISPATCH(TargetName)(); }

}  // namespace slidedp::hostd
#endif  // HWY_ONCE
