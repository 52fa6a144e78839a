#include "hostd/update/adamw.h"

#include <algorithm>
#include <cmath>

#include "hostd/store/split.h"

namespace slidedp::hostd {
namespace {

// Stores the element if all of it is finite.
bool StoreFinite(const PlaneSpan& planes, uint64_t i, float p, float m,
                 float v) {
  if (!Splittable(p) || !std::isfinite(m) || !std::isfinite(v)) return false;
  SplitFloat(p, planes.hi[i], planes.lo[i]);
  planes.m[i] = m;
  planes.v[i] = v;
  return true;
}

float Movement(float m, float v, const AdamWStep& step) {
  const float denominator =
      std::sqrt(v) / step.sqrt_bias_correction2 + step.eps;
  return step.step_size * (m / denominator);
}

template <typename G>
bool UpdateScalar(const PlaneSpan& planes, const G* g, bool decay,
                  const AdamWStep& step) {
  const float factor = decay ? step.decay_factor : 1.0f;
  bool all_finite = true;
  for (uint64_t i = 0; i < planes.count; ++i) {
    const float gradient = step.grad_scale * ToFloat(g[i]);
    float p = JoinFloat(planes.hi[i], planes.lo[i]) * factor;
    const float m = step.beta1 * planes.m[i] + step.one_minus_beta1 * gradient;
    const float v =
        step.beta2 * planes.v[i] + (step.one_minus_beta2 * gradient) * gradient;
    p = p - Movement(m, v, step);
    all_finite &= StoreFinite(planes, i, p, m, v);
  }
  return all_finite;
}

}  // namespace

AdamWStep MakeAdamWStep(double lr, double beta1, double beta2, double eps,
                        double weight_decay, uint64_t t, double grad_scale) {
  const double n = static_cast<double>(t);
  const double bias_correction1 = 1.0 - std::pow(beta1, n);
  const double bias_correction2 = 1.0 - std::pow(beta2, n);
  AdamWStep step;
  step.decay_factor = static_cast<float>(1.0 - lr * weight_decay);
  step.beta1 = static_cast<float>(beta1);
  step.one_minus_beta1 = static_cast<float>(1.0 - beta1);
  step.beta2 = static_cast<float>(beta2);
  step.one_minus_beta2 = static_cast<float>(1.0 - beta2);
  step.eps = static_cast<float>(eps);
  step.step_size = static_cast<float>(lr / bias_correction1);
  step.sqrt_bias_correction2 = static_cast<float>(std::sqrt(bias_correction2));
  step.grad_scale = static_cast<float>(grad_scale);
  return step;
}

bool CanUndo(const AdamWStep& step) {
  // A rounding of m' grows by 1 / beta1.
  constexpr float kSmallest = 0.5f;
  return step.beta1 >= kSmallest && step.beta2 >= kSmallest &&
         step.decay_factor >= kSmallest;
}

bool AdamWCorrectScalar(const PlaneSpan& planes, const bf16* g,
                        const AdamWStep& step, float c) {
  bool all_finite = true;
  for (uint64_t i = 0; i < planes.count; ++i) {
    const float gradient = ToFloat(g[i]), clipped = c * gradient;
    const float before = Movement(planes.m[i], planes.v[i], step);
    const float m = (planes.m[i] - step.one_minus_beta1 * gradient) +
                    step.one_minus_beta1 * clipped;
    const float rest =
        planes.v[i] - (step.one_minus_beta2 * gradient) * gradient;
    const float v =
        std::max(rest, 0.0f) + (step.one_minus_beta2 * clipped) * clipped;
    const float p =
        JoinFloat(planes.hi[i], planes.lo[i]) + (before - Movement(m, v, step));
    all_finite &= StoreFinite(planes, i, p, m, v);
  }
  return all_finite;
}

bool AdamWUndoScalar(const PlaneSpan& planes, const bf16* g, bool decay,
                     const AdamWStep& step) {
  const float factor = decay ? step.decay_factor : 1.0f;
  bool all_finite = true;
  for (uint64_t i = 0; i < planes.count; ++i) {
    const float gradient = ToFloat(g[i]);
    const float p = (JoinFloat(planes.hi[i], planes.lo[i]) +
                     Movement(planes.m[i], planes.v[i], step)) /
                    factor;
    const float m =
        (planes.m[i] - step.one_minus_beta1 * gradient) / step.beta1;
    const float rest =
        planes.v[i] - (step.one_minus_beta2 * gradient) * gradient;
    const float v = std::max(rest, 0.0f) / step.beta2;
    all_finite &= StoreFinite(planes, i, p, m, v);
  }
  return all_finite;
}

bool AdamWUpdateScalar(const PlaneSpan& planes, const bf16* g, bool decay,
                       const AdamWStep& step) {
  return UpdateScalar(planes, g, decay, step);
}

bool AdamWUpdateScalar(const PlaneSpan& planes, const float* g, bool decay,
                       const AdamWStep& step) {
  return UpdateScalar(planes, g, decay, step);
}

}  // namespace slidedp::hostd
