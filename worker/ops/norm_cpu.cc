#include <cmath>

#include "worker/ops/cpu_ops.h"
#include "worker/ops/simd.h"

namespace slidedp::ops {
absl::Status CpuOps::RmsNormForward(ConstAct x, const bf16* w, int64_t tokens,
                                    int64_t hidden, double eps, Act out,
                                    float* rstd, Stream& stream) {
  return Enqueue(stream, [=, this] {
    ForRanges(tokens, kRangeRows, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const float* row = static_cast<const float*>(x) + t * hidden;
        const double mean = simd::Dot(row, row, hidden) / hidden;
        rstd[t] = static_cast<float>(1.0 / std::sqrt(mean + eps));
        simd::NormScale(row, w, rstd[t], hidden,
                        static_cast<float*>(out) + t * hidden);
      }
    });
  });
}

absl::Status CpuOps::RmsNormBackward(ConstAct x, const bf16* w,
                                     const float* rstd, ConstAct d_out,
                                     int64_t tokens, int64_t hidden, bool add,
                                     Act d_x, float* d_w, Act normed,
                                     Stream& stream) {
  return Enqueue(stream, [=, this] {
    const float* in = static_cast<const float*>(x);
    const float* d_y = static_cast<const float*>(d_out);
    // Before d_x or normed is written, which may be d_out.
    ForRanges(hidden, kRangeColumns, [&](int64_t begin, int64_t end) {
      double sums[kRangeColumns] = {};
      for (int64_t t = 0; t < tokens; ++t) {
        simd::NormWeightGradient(in + t * hidden + begin,
                                 d_y + t * hidden + begin, rstd[t], end - begin,
                                 sums);
      }
      simd::AddDoubleToFloat(sums, end - begin, d_w + begin);
    });
    ForRanges(tokens, kRangeRows, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t row = t * hidden;
        const double r = rstd[t];
        const double dot = simd::DotWeighted(d_y + row, in + row, w, hidden);
        simd::NormBackward(in + row, w, d_y + row, rstd[t],
                           static_cast<float>(r * r * r * dot / hidden), add,
                           hidden, static_cast<float*>(d_x) + row);
        if (normed != nullptr) {
          simd::NormScale(in + row, w, rstd[t], hidden,
                          static_cast<float*>(normed) + row);
        }
      }
    });
  });
}

}  // namespace slidedp::ops
