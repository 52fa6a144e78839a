// AdamW over a range of split planes (models.md section 7, torch's order):
//   g = grad_scale * g
//   p = p * (1 - lr * weight_decay)
//   m = beta1 * m + (1 - beta1) * g
//   v = beta2 * v + ((1 - beta2) * g) * g
//   p = p - (lr / bias_correction1) * (m / (sqrt(v) / sqrt_bias_correction2 +
//   eps))
// float32, every operation rounded separately (no fused multiply-add), so the
// scalar reference and all SIMD targets agree bit for bit.
//
// Correction. An update made with c = 1 is turned into the one with c < 1 from
// what it left, m', v', p', and g:
//   beta1 * m0 = m' - (1 - beta1) g        m = beta1 * m0 + (1 - beta1) (c g)
//   beta2 * v0 = v' - ((1 - beta2) g) g    v = beta2 * v0 + ((1 - beta2) c g) c
//   g p0 * decay = p' + s(m', v')            p = p0 * decay - s(m, v)
// with s(m, v) = lr / bias_correction1 * m / (sqrt(v) / sqrt_bias_correction2 +
// eps). Decay multiplies p0 and does not depend on c, nor do t and the bias
// corrections, so p = p' + (s(m', v') - s(m, v)). These are architecture
// section 5's formulas. Taking g's part out before the clipped one goes in
// makes the difference with beta * m0 exact where m0 is 0 (a job's first step),
// and elsewhere no worse than a rounding of m' and v'. beta2 * v0 can't be
// negative but by rounding: it is clamped.
//
// Undoing goes on from there: m0, v0, and p0 = (p' + s(m', v')) / decay. What
// remains is float32 rounding, so betas and decay must not be near 0.
#pragma once

#include <cstdint>

#include "common/base/bf16.h"
#include "hostd/store/host_state.h"

namespace slidedp::hostd {

// Constants of one step for the whole model.
struct AdamWStep {
  float decay_factor;  // 1 - lr * weight_decay
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float eps;
  float step_size;              // lr / (1 - beta1^t)
  float sqrt_bias_correction2;  // sqrt(1 - beta2^t)
  float grad_scale;             // the clip coefficient c; 1 = none
};
// `t` is 1 for the first update. Computed in double, rounded once.
AdamWStep MakeAdamWStep(double lr, double beta1, double beta2, double eps,
                        double weight_decay, uint64_t t, double grad_scale);

// All below take `planes.count` elements and are thread-safe over disjoint
// ranges; gradients need no alignment. They return false if any new p, m or v
// is not finite (or p not splittable); those elements, and no others, stay as
// they were.

bool AdamWUpdate(const PlaneSpan& planes, const bf16* g, bool decay,
                 const AdamWStep& step);
// The same with a float32 gradient (`cpu` route, eager).
bool AdamWUpdate(const PlaneSpan& planes, const float* g, bool decay,
                 const AdamWStep& step);
// The same with a gradient of zeros.
bool AdamWUpdateZero(const PlaneSpan& planes, bool decay,
                     const AdamWStep& step);

// After AdamWUpdate with `step`, whose grad_scale was 1: makes of it an update
// with grad_scale c.
bool AdamWCorrect(const PlaneSpan& planes, const bf16* g, const AdamWStep& step,
                  float c);

// After AdamWUpdate or AdamWUpdateZero with `step`, whose grad_scale was 1:
// back to what was before.
bool AdamWUndo(const PlaneSpan& planes, const bf16* g, bool decay,
               const AdamWStep& step);
bool AdamWUndoZero(const PlaneSpan& planes, bool decay, const AdamWStep& step);
// Whether these constants let an update be undone to rounding.
bool CanUndo(const AdamWStep& step);

// Scalar references.
bool AdamWUpdateScalar(const PlaneSpan& planes, const bf16* g, bool decay,
                       const AdamWStep& step);
bool AdamWUpdateScalar(const PlaneSpan& planes, const float* g, bool decay,
                       const AdamWStep& step);
bool AdamWCorrectScalar(const PlaneSpan& planes, const bf16* g,
                        const AdamWStep& step, float c);
bool AdamWUndoScalar(const PlaneSpan& planes, const bf16* g, bool decay,
                     const AdamWStep& step);

// "AVX3", "AVX2"...: the target that dispatch chose.
const char* AdamWTargetName();

}  // namespace slidedp::hostd
