// What a job's planes must be after some steps, computed plainly.
#include <algorithm>
#include <bit>
#include <cmath>

#include "common/base/check.h"
#include "hostd/update/adamw.h"
#include "tests/unit/hostd_update/fake_ranks.h"

namespace slidedp::hostd {

Snapshot Snapshot::Of(const HostState& state) {
  Snapshot copy;
  for (size_t u = 0; u < state.layout().units.size(); ++u) {
    const PlaneSpan p =
        state.planes(static_cast<int>(u), 0, state.layout().units[u].count);
    copy.hi.insert(copy.hi.end(), p.hi, p.hi + p.count);
    copy.lo.insert(copy.lo.end(), p.lo, p.lo + p.count);
    for (uint64_t i = 0; i < p.count; ++i) {
      copy.m.push_back(std::bit_cast<uint32_t>(p.m[i]));
      copy.v.push_back(std::bit_cast<uint32_t>(p.v[i]));
    }
  }
  return copy;
}

void Snapshot::CopyTo(HostState& state) const {
  size_t at = 0;
  for (size_t u = 0; u < state.layout().units.size(); ++u) {
    const PlaneSpan p =
        state.planes(static_cast<int>(u), 0, state.layout().units[u].count);
    for (uint64_t i = 0; i < p.count; ++i, ++at) {
      p.hi[i] = hi[at];
      p.lo[i] = lo[at];
      p.m[i] = std::bit_cast<float>(m[at]);
      p.v[i] = std::bit_cast<float>(v[at]);
    }
  }
}

namespace {

// Sum of the ranks, as the unit's update gets it: float32 in eager mode,
// rounded to BF16 otherwise.
std::vector<float> Reduced(const Job& job, uint64_t step, int unit) {
  const StepScript& script = job.script[step];
  const uint64_t count = script.gradients[0][unit].size();
  std::vector<float> g(count);
  for (uint64_t i = 0; i < count; ++i) {
    g[i] = Bf16ToFloat(script.gradients[0][unit][i]);
    if (job.route(unit) != policy::GradRoute::kCpu || job.options.ranks == 1) {
      continue;
    }
    for (int r = 1; r < job.options.ranks; ++r) {
      g[i] += Bf16ToFloat(script.gradients[r][unit][i]);
    }
    if (job.options.mode != policy::UpdateMode::kEager) {
      g[i] = Bf16ToFloat(FloatToBf16Even(g[i]));
    }
  }
  return g;
}

}  // namespace

Snapshot Reference(const Job& job, const Snapshot& start, uint64_t steps) {
  Snapshot now = start;
  const model::StateLayout& layout = job.state->layout();
  uint64_t t = 0;
  for (uint64_t s = 0; s < steps; ++s) {
    std::vector<std::vector<float>> reduced;
    double square_norm = 0;
    for (size_t u = 0; u < layout.units.size(); ++u) {
      reduced.push_back(Reduced(job, s, static_cast<int>(u)));
      for (float g : reduced.back()) square_norm += double{g} * g;
    }
    double loss = 0;
    for (double sum : job.script[s].loss_sums) loss += sum;
    const bool deferred = job.options.mode != policy::UpdateMode::kEager;
    if (job.script[s].valid_tokens == 0 ||
        (deferred && !(std::isfinite(loss) && std::isfinite(square_norm)))) {
      continue;
    }
    double c = 1;
    if (job.config.max_grad_norm > 0) {
      c = std::min(1.0,
                   job.config.max_grad_norm / (std::sqrt(square_norm) + 1e-6));
    }
    const AdamWStep step =
        MakeAdamWStep(job.config.lr * policy::LrFactor(job.config.schedule, s),
                      job.config.beta1, job.config.beta2, job.config.eps,
                      job.config.weight_decay, ++t, static_cast<float>(c));
    uint64_t unit_begin = 0;
    for (size_t u = 0; u < layout.units.size(); ++u) {
      for (const model::Tensor& tensor : layout.units[u].tensors) {
        if (tensor.frozen) continue;
        const uint64_t at = unit_begin + tensor.offset;
        const bool ok = AdamWUpdateScalar(
            {now.hi.data() + at, now.lo.data() + at,
             reinterpret_cast<float*>(now.m.data() + at),
             reinterpret_cast<float*>(now.v.data() + at), tensor.count},
            reduced[u].data() + tensor.offset, tensor.decay, step);
        SDP_CHECK(ok, "the reference left the finite range");
      }
      unit_begin += layout.units[u].count;
    }
  }
  return now;
}

}  // namespace slidedp::hostd
