// Conversions, sums, norms and rotation.
#include "worker/ops/simd.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "worker/ops/simd_elementwise.cc"
// clang-format off
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "worker/ops/simd_rows-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace slidedp::ops::simd {
namespace HWY_NAMESPACE {

void Upcast(const bf16* in, size_t n, float* out) {
  ForFloats(n, [&](auto d, size_t i)
                   HWY_ATTR { hn::StoreU(LoadBf16(d, in + i), d, out + i); });
}

void Downcast(const float* in, size_t n, bf16* out) {
  ForFloats(n, [&](auto d, size_t i) HWY_ATTR {
    const hn::Rebind<uint32_t, decltype(d)> du32;
    const hn::Rebind<uint16_t, decltype(d)> du16;
    const auto x = hn::LoadU(d, in + i);
    const auto bits = hn::BitCast(du32, x);
    const auto high = hn::ShiftRight<16>(bits);
    const auto odd = hn::And(high, hn::Set(du32, 1));
    const auto rounded =
        hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(du32, 0x7fff))));
    const auto quiet = hn::Or(high, hn::Set(du32, 0x40));
    const auto is_nan = hn::RebindMask(du32, hn::IsNaN(x));
    hn::StoreU(hn::TruncateTo(du16, hn::IfThenElse(is_nan, quiet, rounded)),
               du16, out + i);
  });
}

void Scale(float factor, size_t n, float* x) {
  ForFloats(n, [&](auto d, size_t i) HWY_ATTR {
    hn::StoreU(hn::Mul(hn::LoadU(d, x + i), hn::Set(d, factor)), d, x + i);
  });
}

void Add(const float* x, size_t n, float* y) {
  ForFloats(n, [&](auto d, size_t i) HWY_ATTR {
    hn::StoreU(hn::Add(hn::LoadU(d, y + i), hn::LoadU(d, x + i)), d, y + i);
  });
}

void AddBf16(const bf16* x, size_t n, float* y) {
  ForFloats(n, [&](auto d, size_t i) HWY_ATTR {
    hn::StoreU(hn::Add(hn::LoadU(d, y + i), LoadBf16(d, x + i)), d, y + i);
  });
}

void AddToDouble(const float* x, size_t n, double* y) {
  ForVectors(DoubleTag(), n, [&](auto d, size_t i) HWY_ATTR {
    hn::StoreU(hn::Add(hn::LoadU(d, y + i), LoadDouble(d, x + i)), d, y + i);
  });
}

void AddDoubleToFloat(const double* x, size_t n, float* y) {
  for (size_t i = 0; i < n; ++i) y[i] += static_cast<float>(x[i]);
}

double Dot(const float* a, const float* b, size_t n) {
  return SumDoubles(n, [&](auto d, size_t i) HWY_ATTR {
    return hn::Mul(LoadDouble(d, a + i), LoadDouble(d, b + i));
  });
}

double DotWeighted(const float* a, const float* b, const bf16* w, size_t n) {
  return SumDoubles(n, [&](auto d, size_t i) HWY_ATTR {
    const auto weight =
        hn::PromoteTo(d, LoadBf16(hn::Rebind<float, decltype(d)>(), w + i));
    return hn::Mul(hn::Mul(LoadDouble(d, a + i), weight), LoadDouble(d, b + i));
  });
}

double SquaredNorm(const bf16* x, size_t n) {
  return SumDoubles(n, [&](auto d, size_t i) HWY_ATTR {
    const auto value =
        hn::PromoteTo(d, LoadBf16(hn::Rebind<float, decltype(d)>(), x + i));
    return hn::Mul(value, value);
  });
}

void NormScale(const float* x, const bf16* w, float rstd, size_t n,
               float* out) {
  ForFloats(n, [&](auto d, size_t i) HWY_ATTR {
    const auto normed = hn::Mul(hn::LoadU(d, x + i), hn::Set(d, rstd));
    hn::StoreU(hn::Mul(normed, LoadBf16(d, w + i)), d, out + i);
  });
}

void NormBackward(const float* x, const bf16* w, const float* d_out, float rstd,
                  float mean, bool add, size_t n, float* d_x) {
  ForFloats(n, [&](auto d, size_t i) HWY_ATTR {
    const auto g = hn::Mul(hn::LoadU(d, d_out + i), LoadBf16(d, w + i));
    const auto pull = hn::Mul(hn::LoadU(d, x + i), hn::Set(d, mean));
    auto value = hn::Sub(hn::Mul(g, hn::Set(d, rstd)), pull);
    if (add) value = hn::Add(value, hn::LoadU(d, d_x + i));
    hn::StoreU(value, d, d_x + i);
  });
}

void NormWeightGradient(const float* x, const float* d_out, float rstd,
                        size_t n, double* y) {
  ForVectors(DoubleTag(), n, [&](auto d, size_t i) HWY_ATTR {
    const auto normed =
        hn::Mul(LoadDouble(d, x + i), hn::Set(d, static_cast<double>(rstd)));
    const auto term = hn::Mul(normed, LoadDouble(d, d_out + i));
    hn::StoreU(hn::Add(hn::LoadU(d, y + i), term), d, y + i);
  });
}

void Rotate(const float* lo, const float* hi, const float* cos,
            const float* sin, size_t n, float* out_lo, float* out_hi) {
  ForFloats(n, [&](auto d, size_t i) HWY_ATTR {
    const auto a = hn::LoadU(d, lo + i), b = hn::LoadU(d, hi + i);
    const auto c = hn::LoadU(d, cos + i), s = hn::LoadU(d, sin + i);
    hn::StoreU(hn::Sub(hn::Mul(a, c), hn::Mul(b, s)), d, out_lo + i);
    hn::StoreU(hn::Add(hn::Mul(b, c), hn::Mul(a, s)), d, out_hi + i);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace slidedp::ops::simd
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slidedp::ops::simd {

HWY_EXPORT(Upcast);
HWY_EXPORT(Downcast);
HWY_EXPORT(Scale);
HWY_EXPORT(Add);
HWY_EXPORT(AddBf16);
HWY_EXPORT(AddToDouble);
HWY_EXPORT(AddDoubleToFloat);
HWY_EXPORT(Dot);
HWY_EXPORT(DotWeighted);
HWY_EXPORT(SquaredNorm);
HWY_EXPORT(NormScale);
HWY_EXPORT(NormBackward);
HWY_EXPORT(NormWeightGradient);
HWY_EXPORT(Rotate);

void Upcast(const bf16* in, size_t n, float* out) {
  HWY_DYNAMIC_DISPATCH(Upcast)(in, n, out);
}
void Downcast(const float* in, size_t n, bf16* out) {
  HWY_DYNAMIC_DISPATCH(Downcast)(in, n, out);
}
void Scale(float factor, size_t n, float* x) {
  HWY_DYNAMIC_DISPATCH(Scale)(factor, n, x);
}
void Add(const float* x, size_t n, float* y) {
  HWY_DYNAMIC_DISPATCH(Add)(x, n, y);
}
void AddBf16(const bf16* x, size_t n, float* y) {
  HWY_DYNAMIC_DISPATCH(AddBf16)(x, n, y);
}
void AddToDouble(const float* x, size_t n, double* y) {
  HWY_DYNAMIC_DISPATCH(AddToDouble)(x, n, y);
}
void AddDoubleToFloat(const double* x, size_t n, float* y) {
  HWY_DYNAMIC_DISPATCH(AddDoubleToFloat)(x, n, y);
}
double Dot(const float* a, const float* b, size_t n) {
  return HWY_DYNAMIC_DISPATCH(Dot)(a, b, n);
}
double DotWeighted(const float* a, const float* b, const bf16* w, size_t n) {
  return HWY_DYNAMIC_DISPATCH(DotWeighted)(a, b, w, n);
}
double SquaredNorm(const bf16* x, size_t n) {
  return HWY_DYNAMIC_DISPATCH(SquaredNorm)(x, n);
}
void NormScale(const float* x, const bf16* w, float rstd, size_t n,
               float* out) {
  HWY_DYNAMIC_DISPATCH(NormScale)(x, w, rstd, n, out);
}
void NormBackward(const float* x, const bf16* w, const float* d_out, float rstd,
                  float mean, bool add, size_t n, float* d_x) {
  HWY_DYNAMIC_DISPATCH(NormBackward)(x, w, d_out, rstd, mean, add, n, d_x);
}
void NormWeightGradient(const float* x, const float* d_out, float rstd,
                        size_t n, double* y) {
  HWY_DYNAMIC_DISPATCH(NormWeightGradient)(x, d_out, rstd, n, y);
}
void Rotate(const float* lo, const float* hi, const float* cos,
            const float* sin, size_t n, float* out_lo, float* out_hi) {
  HWY_DYNAMIC_DISPATCH(Rotate)(lo, hi, cos, sin, n, out_lo, out_hi);
}

}  // namespace slidedp::ops::simd
#endif  // HWY_ONCE
