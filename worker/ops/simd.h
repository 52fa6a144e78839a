// Row kernels of the CPU ops: contiguous float32 rows, vectorised with run-time
// dispatch (Highway). Pure functions; the order of every sum depends on the row
// length and the CPU's vector width only. Rows need no alignment.
#pragma once

#include <cstddef>

#include "common/base/bf16.h"

namespace slidedp::ops::simd {

// out = float(in), exact.
void Upcast(const bf16* in, size_t n, float* out);
// out = bf16(in), nearest, ties to even; NaN stays NaN.
void Downcast(const float* in, size_t n, bf16* out);

void Scale(float factor, size_t n, float* x);                // x *= factor
void Add(const float* x, size_t n, float* y);                // y += x
void AddBf16(const bf16* x, size_t n, float* y);             // y += float(x)
void AddToDouble(const float* x, size_t n, double* y);       // y += x
void AddDoubleToFloat(const double* x, size_t n, float* y);  // y += float(x)

float Max(const float* x, size_t n);  // -infinity if n is 0
// x = exp(x - max), at most 1 ulp off, 0 below exp(-87); returns the sum, in
// float64. `max` is not below any x.
double ExpSum(float max, size_t n, float* x);

// Sums in float64.
double Dot(const float* a, const float* b, size_t n);
double DotWeighted(const float* a, const float* b, const bf16* w, size_t n);
double SquaredNorm(const bf16* x, size_t n);

// out = x * rstd * w.
void NormScale(const float* x, const bf16* w, float rstd, size_t n, float* out);
// d_x (+)= rstd * (d_out * w) - x * mean, where mean is
// rstd^3 * sum(d_out * w * x) / n. d_x may be d_out.
void NormBackward(const float* x, const bf16* w, const float* d_out, float rstd,
                  float mean, bool add, size_t n, float* d_x);
// y += d_out * x * rstd, in float64.
void NormWeightGradient(const float* x, const float* d_out, float rstd,
                        size_t n, double* y);

// (lo, hi) turns by the angles: lo' = lo cos - hi sin, hi' = hi cos + lo sin.
// In place allowed.
void Rotate(const float* lo, const float* hi, const float* cos,
            const float* sin, size_t n, float* out_lo, float* out_hi);

// scores = exp(scores - lse) = p, as ExpSum gives it; d_p = p * (d_p - delta) *
// scale.
void SoftmaxBackward(float lse, float delta, float scale, size_t n,
                     float* scores, float* d_p);

// out = silu(gate) * up.
void SwiGlu(const float* gate, const float* up, size_t n, float* out);
// d_gate may be gate, d_up may be up. `activated`, if not null, becomes what
// SwiGlu gives; it may be d_out.
void SwiGluBackward(const float* gate, const float* up, const float* d_out,
                    size_t n, float* d_gate, float* d_up, float* activated);

}  // namespace slidedp::ops::simd
