#include "hostd/update/adamw.h"

#include <cmath>

#include "hostd/store/split.h"

namespace slidedp::hostd {
namespace {

float ToFloat(bf16 g) { return Bf16ToFloat(g); }
float ToFloat(float g) { return g; }

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
    const float denominator =
        std::sqrt(v) / step.sqrt_bias_correction2 + step.eps;
    p = p - step.step_size * (m / denominator);
    if (!Splittable(p) || !std::isfinite(m) || !std::isfinite(v)) {
      all_finite = false;
      continue;
    }
    SplitFloat(p, planes.hi[i], planes.lo[i]);
    planes.m[i] = m;
    planes.v[i] = v;
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

bool AdamWUpdateScalar(const PlaneSpan& planes, const bf16* g, bool decay,
                       const AdamWStep& step) {
  return UpdateScalar(planes, g, decay, step);
}

bool AdamWUpdateScalar(const PlaneSpan& planes, const float* g, bool decay,
                       const AdamWStep& step) {
  return UpdateScalar(planes, g, decay, step);
}

}  // namespace slidedp::hostd
