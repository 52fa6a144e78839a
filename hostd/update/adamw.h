// AdamW over a range of split planes (models.md section 7, torch's order):
//   g = grad_scale * g
//   p = p * (1 - lr * weight_decay)
//   m = beta1 * m + (1 - beta1) * g
//   v = beta2 * v + ((1 - beta2) * g) * g
//   p = p - (lr / bias_correction1) * (m / (sqrt(v) / sqrt_bias_correction2 +
//   eps))
// float32, every operation rounded separately (no fused multiply-add), so the
// scalar reference and all SIMD targets agree bit for bit.
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

// Updates `planes.count` elements with gradient g, which needs no alignment.
// Thread-safe over disjoint ranges. Returns false if any new p, m or v is not
// finite (or p not splittable); those elements, and no others, stay as they
// were.
bool AdamWUpdate(const PlaneSpan& planes, const bf16* g, bool decay,
                 const AdamWStep& step);
// The same with a float32 gradient (`cpu` route, eager).
bool AdamWUpdate(const PlaneSpan& planes, const float* g, bool decay,
                 const AdamWStep& step);

// Scalar references of both.
bool AdamWUpdateScalar(const PlaneSpan& planes, const bf16* g, bool decay,
                       const AdamWStep& step);
bool AdamWUpdateScalar(const PlaneSpan& planes, const float* g, bool decay,
                       const AdamWStep& step);

// "AVX3", "AVX2"...: the target that dispatch chose.
const char* AdamWTargetName();

}  // namespace slidedp::hostd
