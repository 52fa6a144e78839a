// The vector forms of AdamW, compiled once for each SIMD target of the
// architecture; the best one that the CPU has is chosen at run time.
#include <cstdint>
#include <type_traits>

#include "common/base/bf16.h"
#include "common/base/units.h"
#include "hostd/update/adamw.h"
#include "hostd/update/prefetch.h"

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
using VF = hn::Vec<F32>;

struct Zeros {
  Zeros operator+(size_t) const { return {}; }
  bf16 operator[](size_t) const { return 0; }
};

HWY_INLINE VF LoadGradient(const bf16* g) {
  return hn::BitCast(
      F32(), hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(U16(), g))));
}
HWY_INLINE VF LoadGradient(const float* g) { return hn::LoadU(F32(), g); }
HWY_INLINE VF LoadGradient(Zeros) { return hn::Zero(F32()); }

// Lanes whose magnitude, as a bit pattern, is below `limit`.
HWY_INLINE hn::Mask<I32> Below(VF x, int32_t limit) {
  const I32 di;
  return hn::Lt(hn::And(hn::BitCast(di, x), hn::Set(di, 0x7fffffff)),
                hn::Set(di, limit));
}

// A vector of elements.
struct Element {
  VF p, m, v;
};

// x / divisor, correctly rounded: with fused multiply-add, by a product, its
// exact remainder and one correction (Markstein), as the divider is what AdamW
// waits for. `reciprocal` is 1 / divisor, correctly rounded. For x = 0 and
// where neither the quotient nor the remainder underflows: square roots, whose
// remainders are far above the smallest float, and divisors up to 1. Where x is
// infinite, the NaN that comes out is refused as the infinity would be.
HWY_INLINE VF DivideRoot(VF x, float divisor, float reciprocal) {
  const F32 df;
#if HWY_NATIVE_FMA
  const auto r = hn::Set(df, reciprocal);
  const auto quotient = hn::Mul(x, r);
  const auto remainder = hn::NegMulAdd(quotient, hn::Set(df, divisor), x);
  return hn::MulAdd(remainder, r, quotient);
#else
  return hn::Div(x, hn::Set(df, divisor));
#endif
}

// By value: the planes' stores could change what is behind a reference, for all
// that the compiler knows.
struct Constants : AdamWStep {
  explicit Constants(const AdamWStep& step)
      : AdamWStep(step), reciprocal(1.0f / step.sqrt_bias_correction2) {}
  float reciprocal;
};

// `root` is the square root of v.
HWY_INLINE VF MovementOf(VF m, VF root, const Constants& step) {
  const F32 df;
  const auto denominator =
      hn::Add(DivideRoot(root, step.sqrt_bias_correction2, step.reciprocal),
              hn::Set(df, step.eps));
  return hn::Mul(hn::Set(df, step.step_size), hn::Div(m, denominator));
}
HWY_INLINE VF Movement(VF m, VF v, const Constants& step) {
  return MovementOf(m, hn::Sqrt(v), step);
}

struct Moments {
  VF m, v, root;
};

// The operations of the scalar references, in their order.
struct Update {
  Constants step;
  float factor;

  HWY_INLINE Moments NewMoments(VF m0, VF v0, VF gradient) const {
    const F32 df;
    const auto g = hn::Mul(hn::Set(df, step.grad_scale), gradient);
    const auto m = hn::Add(hn::Mul(hn::Set(df, step.beta1), m0),
                           hn::Mul(hn::Set(df, step.one_minus_beta1), g));
    const auto v =
        hn::Add(hn::Mul(hn::Set(df, step.beta2), v0),
                hn::Mul(hn::Mul(hn::Set(df, step.one_minus_beta2), g), g));
    return {m, v, hn::Sqrt(v)};
  }
  HWY_INLINE VF NewP(VF p, VF movement) const {
    return hn::Sub(hn::Mul(p, hn::Set(F32(), factor)), movement);
  }
  HWY_INLINE Element operator()(const Element& e, VF gradient) const {
    const Moments now = NewMoments(e.m, e.v, gradient);
    return {NewP(e.p, MovementOf(now.m, now.root, step)), now.m, now.v};
  }
};

// beta1 * m0 and beta2 * v0, before the update that left `e`.
HWY_INLINE VF RestOfM(const Element& e, VF g, const Constants& step) {
  return hn::Sub(e.m, hn::Mul(hn::Set(F32(), step.one_minus_beta1), g));
}
HWY_INLINE VF RestOfV(const Element& e, VF g, const Constants& step) {
  const F32 df;
  const auto rest =
      hn::Sub(e.v, hn::Mul(hn::Mul(hn::Set(df, step.one_minus_beta2), g), g));
  // As std::max does: a NaN and a negative zero stay.
  return hn::IfThenElse(hn::Lt(rest, hn::Zero(df)), hn::Zero(df), rest);
}

struct Correct {
  Constants step;
  float c;

  HWY_INLINE Element operator()(const Element& e, VF g) const {
    const F32 df;
    const auto clipped = hn::Mul(hn::Set(df, c), g);
    const auto m = hn::Add(RestOfM(e, g, step),
                           hn::Mul(hn::Set(df, step.one_minus_beta1), clipped));
    const auto v = hn::Add(
        RestOfV(e, g, step),
        hn::Mul(hn::Mul(hn::Set(df, step.one_minus_beta2), clipped), clipped));
    const auto p =
        hn::Add(e.p, hn::Sub(Movement(e.m, e.v, step), Movement(m, v, step)));
    return {p, m, v};
  }
};

struct Undo {
  Constants step;
  float factor;

  HWY_INLINE Element operator()(const Element& e, VF g) const {
    const F32 df;
    return {
        hn::Div(hn::Add(e.p, Movement(e.m, e.v, step)), hn::Set(df, factor)),
        hn::Div(RestOfM(e, g, step), hn::Set(df, step.beta1)),
        hn::Div(RestOfV(e, g, step), hn::Set(df, step.beta2))};
  }
};

// The bits of p.
HWY_INLINE hn::Vec<I32> LoadBits(const PlaneSpan& planes) {
  const I32 di;
  return hn::Add(hn::ShiftLeft<16>(hn::BitCast(
                     di, hn::PromoteTo(U32(), hn::LoadU(U16(), planes.hi)))),
                 hn::PromoteTo(di, hn::LoadU(I16(), planes.lo)));
}

// `planes` still hold what was before, and of p `old_bits`.
HWY_INLINE bool StoreVector(const PlaneSpan& planes, hn::Vec<I32> old_bits,
                            Element e) {
  const F32 df;
  const I32 di;
  const U32 du;
  const I16 di16;
  const U16 du16;
  auto bits = hn::BitCast(di, e.p);
  const auto ok =
      hn::And(Below(e.p, 0x7f800000 - 0x8000),  // Splittable
              hn::And(Below(e.m, 0x7f800000), Below(e.v, 0x7f800000)));
  const bool all_ok = hn::AllTrue(di, ok);
  if (HWY_UNLIKELY(!all_ok)) {
    bits = hn::IfThenElse(ok, bits, old_bits);
    const auto ok_float = hn::RebindMask(df, ok);
    e.m = hn::IfThenElse(ok_float, e.m, hn::LoadU(df, planes.m));
    e.v = hn::IfThenElse(ok_float, e.v, hn::LoadU(df, planes.v));
  }
  const auto high =
      hn::ShiftRight<16>(hn::BitCast(du, hn::Add(bits, hn::Set(di, 0x8000))));
  const auto low = hn::Sub(bits, hn::BitCast(di, hn::ShiftLeft<16>(high)));
  // Both fit: high is in [0, 65535] and low in [-32768, 32767].
  hn::StoreU(hn::DemoteTo(du16, hn::BitCast(di, high)), du16, planes.hi);
  hn::StoreU(hn::DemoteTo(di16, low), di16, planes.lo);
  hn::StoreU(e.m, df, planes.m);
  hn::StoreU(e.v, df, planes.v);
  return all_ok;
}

template <typename Rule, typename G>
HWY_INLINE bool ApplyVector(const PlaneSpan& planes, G g, const Rule& rule) {
  const F32 df;
  const auto bits = LoadBits(planes);
  const Element old = {hn::BitCast(df, bits), hn::LoadU(df, planes.m),
                       hn::LoadU(df, planes.v)};
  return StoreVector(planes, bits, rule(old, LoadGradient(g)));
}

HWY_INLINE PlaneSpan From(PlaneSpan planes, uint64_t i) {
  return {planes.hi + i, planes.lo + i, planes.m + i, planes.v + i,
          planes.count - i};
}

using hostd::PrefetchGradient;
HWY_INLINE void PrefetchGradient(Zeros, uint64_t) {}

template <typename Rule, typename G>
HWY_INLINE bool ApplyVectors(PlaneSpan planes, G g, const Rule& rule) {
  const size_t lanes = hn::Lanes(F32());
  bool ok = true;
  for (uint64_t i = 0; i + lanes <= planes.count; i += lanes) {
    PrefetchPlanes(planes, i);
    PrefetchGradient(g, i);
    ok &= ApplyVector(From(planes, i), g + i, rule);
  }
  return ok;
}

// The update in three stages, each of another vector: what takes long, a root
// or a quotient, is there when the next stage needs it. In one stage its many
// dependents fill the scheduler, which then sees two vectors at a time.
template <typename G>
HWY_INLINE bool ApplyVectors(PlaneSpan planes, G g, const Update& rule) {
  const F32 df;
  const size_t lanes = hn::Lanes(df);
  const uint64_t vectors = planes.count / lanes;
  const auto at = [&](uint64_t n) { return From(planes, n * lanes); };
  const auto begin = [&](uint64_t n) HWY_ATTR {
    return rule.NewMoments(hn::LoadU(df, at(n).m), hn::LoadU(df, at(n).v),
                           LoadGradient(g + n * lanes));
  };
  const auto finish = [&](uint64_t n, VF m, VF v, VF movement) HWY_ATTR {
    const auto bits = LoadBits(at(n));
    const VF p = rule.NewP(hn::BitCast(df, bits), movement);
    return StoreVector(at(n), bits, {p, m, v});
  };
  if (vectors < 2) return vectors == 0 || ApplyVector(planes, g, rule);
  bool ok = true;
  const Moments first = begin(0), second = begin(1);
  // One by one: g++ keeps structures of vectors in memory.
  VF older_m = first.m, older_v = first.v;
  VF movement = MovementOf(first.m, first.root, rule.step);
  VF m = second.m, v = second.v, root = second.root;
  for (uint64_t n = 2; n < vectors; ++n) {
    PrefetchPlanes(planes, n * lanes);
    PrefetchGradient(g, n * lanes);
    const Moments newest = begin(n);
    const VF next = MovementOf(m, root, rule.step);
    ok &= finish(n - 2, older_m, older_v, movement);
    older_m = m;
    older_v = v;
    movement = next;
    m = newest.m;
    v = newest.v;
    root = newest.root;
  }
  ok &= finish(vectors - 2, older_m, older_v, movement);
  return finish(vectors - 1, m, v, MovementOf(m, root, rule.step)) && ok;
}

// Fewer elements than a vector: through buffers, so that nothing past the end
// is touched. Spare lanes repeat the last element, so that they are refused
// only if it is.
template <typename Rule, typename G>
HWY_NOINLINE bool ApplyTail(PlaneSpan planes, G g, const Rule& rule) {
  bf16 hi[kMaxLanes];
  int16_t lo[kMaxLanes];
  float m[kMaxLanes], v[kMaxLanes];
  using Value = std::remove_cvref_t<decltype(g[0])>;
  Value values[kMaxLanes];
  for (size_t i = 0; i < kMaxLanes; ++i) {
    const size_t from = i < planes.count ? i : planes.count - 1;
    hi[i] = planes.hi[from];
    lo[i] = planes.lo[from];
    m[i] = planes.m[from];
    v[i] = planes.v[from];
    values[i] = g[from];
  }
  const PlaneSpan buffer = {hi, lo, m, v, kMaxLanes};
  const Value* gradient = values;
  const bool ok = ApplyVector(buffer, gradient, rule);
  for (size_t i = 0; i < planes.count; ++i) {
    planes.hi[i] = hi[i];
    planes.lo[i] = lo[i];
    planes.m[i] = m[i];
    planes.v[i] = v[i];
  }
  return ok;
}

template <typename Rule, typename G>
HWY_INLINE bool Apply(PlaneSpan planes, G g, const Rule& rule) {
  const uint64_t whole = planes.count / hn::Lanes(F32()) * hn::Lanes(F32());
  bool ok = ApplyVectors(planes, g, rule);
  if (whole < planes.count) {
    ok &= ApplyTail(From(planes, whole), g + whole, rule);
  }
  return ok;
}

bool UpdateBf16(const PlaneSpan& planes, const bf16* g, float factor,
                const AdamWStep& step) {
  return Apply(planes, g, Update{Constants(step), factor});
}
bool UpdateF32(const PlaneSpan& planes, const float* g, float factor,
               const AdamWStep& step) {
  return Apply(planes, g, Update{Constants(step), factor});
}
bool UpdateZero(const PlaneSpan& planes, float factor, const AdamWStep& step) {
  return Apply(planes, Zeros(), Update{Constants(step), factor});
}
bool CorrectBf16(const PlaneSpan& planes, const bf16* g, const AdamWStep& step,
                 float c) {
  return Apply(planes, g, Correct{Constants(step), c});
}
bool UndoBf16(const PlaneSpan& planes, const bf16* g, float factor,
              const AdamWStep& step) {
  return Apply(planes, g, Undo{Constants(step), factor});
}
bool UndoZero(const PlaneSpan& planes, float factor, const AdamWStep& step) {
  return Apply(planes, Zeros(), Undo{Constants(step), factor});
}

const char* TargetName() { return hwy::TargetName(HWY_TARGET); }

}  // namespace slidedp::hostd::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slidedp::hostd {

HWY_EXPORT(UpdateBf16);
HWY_EXPORT(UpdateF32);
HWY_EXPORT(UpdateZero);
HWY_EXPORT(CorrectBf16);
HWY_EXPORT(UndoBf16);
HWY_EXPORT(UndoZero);
HWY_EXPORT(TargetName);

namespace {

float Factor(bool decay, const AdamWStep& step) {
  return decay ? step.decay_factor : 1.0f;
}

}  // namespace

bool AdamWUpdate(const PlaneSpan& planes, const bf16* g, bool decay,
                 const AdamWStep& step) {
  return HWY_DYNAMIC_DISPATCH(UpdateBf16)(planes, g, Factor(decay, step), step);
}

bool AdamWUpdate(const PlaneSpan& planes, const float* g, bool decay,
                 const AdamWStep& step) {
  return HWY_DYNAMIC_DISPATCH(UpdateF32)(planes, g, Factor(decay, step), step);
}

bool AdamWUpdateZero(const PlaneSpan& planes, bool decay,
                     const AdamWStep& step) {
  return HWY_DYNAMIC_DISPATCH(UpdateZero)(planes, Factor(decay, step), step);
}

bool AdamWCorrect(const PlaneSpan& planes, const bf16* g, const AdamWStep& step,
                  float c) {
  return HWY_DYNAMIC_DISPATCH(CorrectBf16)(planes, g, step, c);
}

bool AdamWUndo(const PlaneSpan& planes, const bf16* g, bool decay,
               const AdamWStep& step) {
  return HWY_DYNAMIC_DISPATCH(UndoBf16)(planes, g, Factor(decay, step), step);
}

bool AdamWUndoZero(const PlaneSpan& planes, bool decay, const AdamWStep& step) {
  return HWY_DYNAMIC_DISPATCH(UndoZero)(planes, Factor(decay, step), step);
}

const char* AdamWTargetName() { return HWY_DYNAMIC_DISPATCH(TargetName)(); }

}  // namespace slidedp::hostd
#endif  // HWY_ONCE
