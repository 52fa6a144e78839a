// AdamW: every SIMD target equals the scalar reference bit for bit, and the
// scalar reference is close to the formula in double.
#include "hostd/update/adamw.h"

#include <bit>
#include <cmath>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "tests/unit/hostd_update/adamw_fixture.h"

namespace slidedp::hostd {
namespace {

TEST_F(AdamWTargetTest, DispatchReachesEveryTargetOfThisCpu) {
  std::vector<std::string> names;
  for (int64_t target : Targets()) {
    Choose(target);
    names.emplace_back(AdamWTargetName());
  }
  ASSERT_FALSE(names.empty());
#if defined(__x86_64__)
  // Two or more: the baseline and what every x86-64 server has had since 2013.
  EXPECT_GE(std::set<std::string>(names.begin(), names.end()).size(), 2u);
#endif
  RecordProperty("targets", absl::StrJoin(names, " "));
}

TEST_F(AdamWTargetTest, EqualsScalarBitForBit) {
  for (int64_t target : Targets()) {
    Choose(target);
    for (Values values :
         {Values::kUsual, Values::kDenormal, Values::kHuge, Values::kAnyBits}) {
      Source source(values, 7);
      for (uint64_t count = 1; count <= 67; ++count) {
        const uint64_t offset = kMargin + count % 5;
        const Planes start = source.MakePlanes(offset + count + kMargin);
        std::vector<bf16> g_bf16;
        std::vector<float> g_f32;
        for (uint64_t i = 0; i < count; ++i) {
          g_bf16.push_back(source.Gradient());
          g_f32.push_back(source.Finite());
        }
        for (double scale : {1.0, 0.37}) {
          const AdamWStep step = UsualStep(count, scale);
          ExpectSameAsScalar(start, g_bf16, offset, count, count % 2, step);
          ExpectSameAsScalar(start, g_f32, offset, count, count % 2, step);
        }
      }
    }
  }
}

TEST_F(AdamWTargetTest, EqualsScalarOverManySteps) {
  constexpr uint64_t kCount = 1531;
  for (int64_t target : Targets()) {
    Choose(target);
    Source source(Values::kUsual, 11);
    Planes simd = source.MakePlanes(kCount);
    Planes scalar = simd;
    for (uint64_t t = 1; t <= 50; ++t) {
      std::vector<bf16> g;
      for (uint64_t i = 0; i < kCount; ++i) g.push_back(source.Gradient());
      const AdamWStep step = UsualStep(t, t % 3 == 0 ? 0.5 : 1.0);
      ASSERT_TRUE(AdamWUpdate(simd.Span(0, kCount), g.data(), true, step));
      ASSERT_TRUE(
          AdamWUpdateScalar(scalar.Span(0, kCount), g.data(), true, step));
    }
    EXPECT_TRUE(SameBits(simd, scalar)) << AdamWTargetName();
  }
}

TEST_F(AdamWTargetTest, RefusesNonFiniteAndLeavesOnlyThoseElements) {
  constexpr uint64_t kCount = 37;
  const bf16 kNan = 0x7fc0, kInfinity = 0x7f80;
  for (int64_t target : Targets()) {
    Choose(target);
    for (uint64_t bad : {0u, 5u, 31u, 36u}) {
      for (bf16 value : {kNan, kInfinity}) {
        Source source(Values::kUsual, 3);
        const Planes start = source.MakePlanes(kCount);
        std::vector<bf16> g;
        for (uint64_t i = 0; i < kCount; ++i) g.push_back(source.Gradient());
        const AdamWStep step = UsualStep(1, 1.0);
        Planes clean = start;
        ASSERT_TRUE(AdamWUpdate(clean.Span(0, kCount), g.data(), true, step));
        g[bad] = value;
        Planes planes = start;
        EXPECT_FALSE(AdamWUpdate(planes.Span(0, kCount), g.data(), true, step));
        Planes expected = clean;
        expected.hi[bad] = start.hi[bad];
        expected.lo[bad] = start.lo[bad];
        expected.m[bad] = start.m[bad];
        expected.v[bad] = start.v[bad];
        EXPECT_TRUE(SameBits(planes, expected)) << AdamWTargetName();
      }
    }
  }
}

TEST_F(AdamWTargetTest, RefusesAWeightWhoseHiWouldBeInfinite) {
  for (int64_t target : Targets()) {
    Choose(target);
    Planes planes;
    // Finite in float32 after the step, but rounds to infinity in bfloat16.
    for (int i = 0; i < 9; ++i) {
      planes.Add(std::bit_cast<float>(0x7f7f7fffu), 0.0f, 0.0f);
    }
    const Planes start = planes;
    AdamWStep step = UsualStep(1, 1.0);
    step.step_size = 0x1p109f;  // moves p by 3 units in the last place
    const std::vector<float> g(9, -1.0f);
    EXPECT_FALSE(AdamWUpdate(planes.Span(0, 9), g.data(), false, step));
    EXPECT_TRUE(SameBits(planes, start)) << AdamWTargetName();
  }
}

TEST(AdamWTest, ScalarIsWithinStatedBoundOfDouble) {
  // u = 2^-24 is one rounding. By counting the roundings of each line, those of
  // the constants included: m within 3 u of its two terms' magnitudes, v within
  // 5 u of itself, p within 3 u of |p| and 12 u of the step's magnitude.
  constexpr double u = 0x1p-24;
  constexpr double lr = 3e-4, beta1 = 0.9, beta2 = 0.999, eps = 1e-8;
  constexpr double decay = 0.1, scale = 0.37;
  std::mt19937 random(5);
  std::normal_distribution<float> weights(0, 0.05f), gradients(0, 1e-3f);
  for (uint64_t t : {1u, 2u, 10u, 1000u, 100000u}) {
    const AdamWStep step =
        MakeAdamWStep(lr, beta1, beta2, eps, decay, t, scale);
    for (int i = 0; i < 2000; ++i) {
      Planes planes;
      const float square = gradients(random);
      planes.Add(weights(random), gradients(random), square * square);
      const double p0 = planes.p(0), m0 = planes.m[0], v0 = planes.v[0];
      const float gradient = gradients(random);
      ASSERT_TRUE(AdamWUpdateScalar(planes.Span(0, 1), &gradient, true, step));

      const double g = scale * gradient;
      const double decayed = p0 * (1 - lr * decay);
      const double m = beta1 * m0 + (1 - beta1) * g;
      const double v = beta2 * v0 + (1 - beta2) * g * g;
      const double denominator =
          std::sqrt(v) / std::sqrt(1 - std::pow(beta2, t)) + eps;
      const double step_size = lr / (1 - std::pow(beta1, t));
      const double p = decayed - step_size * m / denominator;
      const double m_terms = std::fabs(beta1 * m0) + std::fabs((1 - beta1) * g);
      EXPECT_NEAR(planes.m[0], m, 3 * u * m_terms);
      EXPECT_NEAR(planes.v[0], v, 5 * u * v);
      EXPECT_NEAR(planes.p(0), p,
                  3 * u * std::fabs(decayed) +
                      12 * u * step_size * m_terms / denominator);
    }
  }
}

TEST(AdamWTest, ConstantsAreRoundedOnceFromDouble) {
  const AdamWStep step = MakeAdamWStep(1e-3, 0.9, 0.999, 1e-8, 0.1, 1, 0.25);
  EXPECT_EQ(step.decay_factor, static_cast<float>(1.0 - 1e-4));
  EXPECT_EQ(step.one_minus_beta1, static_cast<float>(1.0 - 0.9));
  EXPECT_EQ(step.one_minus_beta2, static_cast<float>(1.0 - 0.999));
  EXPECT_NEAR(step.step_size, 1e-2, 1e-9);
  EXPECT_FLOAT_EQ(step.sqrt_bias_correction2, std::sqrt(1e-3f));
  EXPECT_EQ(step.grad_scale, 0.25f);
}

TEST(AdamWTest, FirstStepMovesByTheLearningRateAgainstTheGradientsSign) {
  for (float gradient : {-3.0f, 0.5f}) {
    Planes planes;
    planes.Add(1.0f, 0.0f, 0.0f);
    ASSERT_TRUE(AdamWUpdate(planes.Span(0, 1), &gradient, false,
                            MakeAdamWStep(0.01, 0.9, 0.999, 1e-8, 0, 1, 1)));
    EXPECT_NEAR(planes.p(0), gradient > 0 ? 0.99f : 1.01f, 1e-6f);
  }
}

TEST(AdamWTest, DecayAppliesOnlyWhereItIsAsked) {
  Planes with, without;
  with.Add(1.0f, 0.0f, 0.0f);
  without.Add(1.0f, 0.0f, 0.0f);
  const float zero = 0.0f;
  const AdamWStep step = MakeAdamWStep(0.1, 0.9, 0.999, 1e-8, 0.5, 1, 1);
  ASSERT_TRUE(AdamWUpdate(with.Span(0, 1), &zero, true, step));
  ASSERT_TRUE(AdamWUpdate(without.Span(0, 1), &zero, false, step));
  EXPECT_FLOAT_EQ(with.p(0), 0.95f);
  EXPECT_EQ(without.p(0), 1.0f);
}

}  // namespace
}  // namespace slidedp::hostd
