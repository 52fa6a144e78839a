// The row kernels on every SIMD target that this CPU has.
#include "worker/ops/simd.h"

#include "hwy/targets.h"
#include "tests/unit/worker_ops/ops_fixture.h"

namespace slidedp::ops {
namespace {

class SimdTest : public testing::TestWithParam<int64_t> {
 protected:
  SimdTest() { hwy::SetSupportedTargetsForTest(GetParam()); }
  ~SimdTest() override { hwy::SetSupportedTargetsForTest(0); }
};

std::vector<int64_t> Targets() {
  std::vector<int64_t> targets;
  for (int64_t rest = hwy::SupportedTargets() & HWY_TARGETS; rest != 0;
       rest &= rest - 1) {
    targets.push_back(rest & -rest);
  }
  return targets;
}

TEST_P(SimdTest, ExponentialIsWithinOneUlpOfExact) {
  // Softmax arguments: not positive. Below -87 the result is 0, not subnormal.
  Floats x;
  for (double value = -110; value <= 0; value += 0.00173) {
    x.push_back(static_cast<float>(value));
  }
  Floats e = x;
  const double sum = simd::ExpSum(0, e.size(), e.data());
  double want_sum = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double want = std::exp(static_cast<double>(x[i]));
    if (x[i] < -87) {
      ASSERT_EQ(e[i], 0) << x[i];
    } else {
      // Half an ulp of the nearest float is unavoidable.
      ASSERT_NEAR(e[i], want, want * std::exp2(-23.0)) << x[i];
    }
    want_sum += e[i];
  }
  EXPECT_NEAR(sum, want_sum, want_sum * 1e-13);
}

TEST_P(SimdTest, EveryLengthUpToSeveralVectorsIsCovered) {
  for (size_t n = 0; n <= 70; ++n) {
    const Floats a = RandomFloats(n, 1), b = RandomFloats(n, 2);
    const Bf16s w = RandomBf16s(n, 3);
    double dot = 0, weighted = 0, norm = 0;
    float max = -INFINITY;
    Floats wide(n, kNaN), scaled(n, kNaN), sum = b, bf16_sum = b;
    simd::Upcast(w.data(), n, wide.data());
    simd::NormScale(a.data(), w.data(), 0.5f, n, scaled.data());
    simd::Add(a.data(), n, sum.data());
    simd::AddBf16(w.data(), n, bf16_sum.data());
    Bf16s narrow(n, 1);
    simd::Downcast(a.data(), n, narrow.data());
    for (size_t i = 0; i < n; ++i) {
      const float weight = Bf16ToFloat(w[i]);
      ASSERT_EQ(wide[i], weight);
      ASSERT_EQ(scaled[i], a[i] * 0.5f * weight);
      ASSERT_EQ(sum[i], b[i] + a[i]);
      ASSERT_EQ(bf16_sum[i], b[i] + weight);
      ASSERT_EQ(narrow[i], FloatToBf16Even(a[i]));
      dot += double(a[i]) * b[i];
      weighted += double(a[i]) * b[i] * weight;
      norm += double(weight) * weight;
      max = std::max(max, a[i]);
    }
    EXPECT_NEAR(simd::Dot(a.data(), b.data(), n), dot, 1e-12);
    EXPECT_NEAR(simd::DotWeighted(a.data(), b.data(), w.data(), n), weighted,
                1e-12);
    EXPECT_NEAR(simd::SquaredNorm(w.data(), n), norm, 1e-12);
    EXPECT_EQ(simd::Max(a.data(), n), max);
  }
}

TEST_P(SimdTest, GateAndRotationMatchReference) {
  for (const size_t n : {1, 7, 8, 40, 77}) {
    const Floats x = RandomFloats(2 * n, 1, 3), d_out = RandomFloats(n, 2);
    Floats out(n), d(2 * n);
    simd::SwiGlu(&x[0], &x[n], n, out.data());
    simd::SwiGluBackward(&x[0], &x[n], d_out.data(), n, &d[0], &d[n], nullptr);
    EXPECT_LT(RelativeError(out, reference::SwiGlu(Wide(x), 1, n)), kTolerance);
    EXPECT_LT(
        RelativeError(d, reference::SwiGluBackward(Wide(x), Wide(d_out), 1, n)),
        kTolerance);
    const Floats cos = RandomFloats(n, 3), sin = RandomFloats(n, 4);
    Floats turned = x;
    simd::Rotate(&turned[0], &turned[n], cos.data(), sin.data(), n, &turned[0],
                 &turned[n]);
    for (size_t i = 0; i < n; ++i) {
      ASSERT_EQ(turned[i], x[i] * cos[i] - x[n + i] * sin[i]);
      ASSERT_EQ(turned[n + i], x[n + i] * cos[i] + x[i] * sin[i]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Targets, SimdTest, testing::ValuesIn(Targets()),
                         [](const auto& info) {
                           return std::string(hwy::TargetName(info.param));
                         });

}  // namespace
}  // namespace slidedp::ops
