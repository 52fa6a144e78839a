// Updates that are corrected, undone, without a gradient or stored past the
// caches.
#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "tests/unit/hostd_update/adamw_fixture.h"

namespace slidedp::hostd {
namespace {

TEST_F(AdamWTargetTest, ZeroGradientEqualsAGradientOfZeros) {
  for (int64_t target : Targets()) {
    Choose(target);
    for (Values values : {Values::kUsual, Values::kDenormal, Values::kHuge}) {
      Source source(values, 17);
      for (uint64_t count : {1u, 3u, 8u, 16u, 37u, 64u}) {
        const Planes start = source.MakePlanes(count);
        const std::vector<bf16> zeros(count);
        Planes simd = start, scalar = start;
        const AdamWStep step = UsualStep(3, 1);
        EXPECT_EQ(
            AdamWUpdateZero(simd.Span(0, count), true, step),
            AdamWUpdateScalar(scalar.Span(0, count), zeros.data(), true, step));
        EXPECT_TRUE(SameBits(simd, scalar)) << AdamWTargetName();
      }
    }
  }
}

TEST_F(AdamWTargetTest, CorrectionAndUndoEqualScalarBitForBit) {
  for (int64_t target : Targets()) {
    Choose(target);
    for (Values values :
         {Values::kUsual, Values::kDenormal, Values::kHuge, Values::kAnyBits}) {
      Source source(values, 19);
      for (uint64_t count = 1; count <= 67; ++count) {
        const Planes start = source.MakePlanes(count + kMargin);
        std::vector<bf16> g;
        for (uint64_t i = 0; i < count; ++i) g.push_back(source.Gradient());
        const AdamWStep step = UsualStep(count, 1);
        Planes simd = start, scalar = start;
        EXPECT_EQ(
            AdamWCorrect(simd.Span(0, count), g.data(), step, 0.3f),
            AdamWCorrectScalar(scalar.Span(0, count), g.data(), step, 0.3f));
        EXPECT_TRUE(SameBits(simd, scalar)) << AdamWTargetName();
        simd = scalar = start;
        const bool decay = count % 2;
        EXPECT_EQ(
            AdamWUndo(simd.Span(0, count), g.data(), decay, step),
            AdamWUndoScalar(scalar.Span(0, count), g.data(), decay, step));
        EXPECT_TRUE(SameBits(simd, scalar)) << AdamWTargetName();
        simd = scalar = start;
        const std::vector<bf16> zeros(count);
        EXPECT_EQ(
            AdamWUndoZero(simd.Span(0, count), decay, step),
            AdamWUndoScalar(scalar.Span(0, count), zeros.data(), decay, step));
        EXPECT_TRUE(SameBits(simd, scalar)) << AdamWTargetName();
      }
    }
  }
}

// u = 2^-24 is one rounding; the moments before the update are of the clipped
// gradients' size, so m' and v' are up to 1 / c and 1 / c^2 times what they
// would have been, and their roundings weigh as much more.
TEST(AdamWTest, CorrectionIsTheClippedUpdateToRounding) {
  constexpr double u = 0x1p-24;
  std::mt19937 random(29);
  std::normal_distribution<float> weights(0, 0.05f), gradients(0, 1.0f);
  for (float c : {0.99f, 0.5f, 0.1f, 0.01f}) {
    for (uint64_t t : {1u, 2u, 10u, 1000u}) {
      const AdamWStep early = UsualStep(t, 1), clipped = UsualStep(t, c);
      for (int i = 0; i < 2000; ++i) {
        const bf16 g = FloatToBf16Even(gradients(random));
        const double size = std::fabs(Bf16ToFloat(g));
        Planes corrected;
        const float square = c * gradients(random);
        corrected.Add(weights(random),
                      t == 1 ? 0.0f : 0.3f * c * gradients(random),
                      t == 1 ? 0.0f : square * square);
        Planes expected = corrected;
        ASSERT_TRUE(AdamWUpdate(corrected.Span(0, 1), &g, true, early));
        const double m_early = std::fabs(corrected.m[0]);
        const double v_early = corrected.v[0];
        ASSERT_TRUE(AdamWCorrect(corrected.Span(0, 1), &g, early, c));
        ASSERT_TRUE(AdamWUpdate(expected.Span(0, 1), &g, true, clipped));
        const double m_bound = 4 * u * (m_early + 0.1 * size);
        const double v_bound = 8 * u * (v_early + 0.001 * size * size);
        EXPECT_NEAR(corrected.m[0], expected.m[0], m_bound);
        EXPECT_NEAR(corrected.v[0], expected.v[0], v_bound);
        // The step s = a m / (sqrt(v) / b + eps): its derivatives, at the
        // smaller v of both.
        const double v = std::min(corrected.v[0], expected.v[0]);
        const double root = std::sqrt(v) / early.sqrt_bias_correction2 + 1e-8;
        const double a = early.step_size;
        const double step_bound =
            a * m_bound / root +
            a * std::fabs(expected.m[0]) / root * (v > 0 ? v_bound / v : 0);
        const double early_step =
            a * m_early /
            (std::sqrt(v_early) / early.sqrt_bias_correction2 + 1e-8);
        EXPECT_NEAR(
            corrected.p(0), expected.p(0),
            4 * u * std::fabs(expected.p(0)) + 8 * u * early_step + step_bound)
            << "c " << c << ", t " << t;
      }
    }
  }
}

TEST(AdamWTest, CorrectionOfTheFirstStepHasExactMoments) {
  const AdamWStep early = UsualStep(1, 1), clipped = UsualStep(1, 0.001);
  Source source(Values::kUsual, 31);
  Planes corrected;
  std::vector<bf16> g;
  for (int i = 0; i < 1000; ++i) {
    corrected.Add(source.Finite(), 0, 0);
    g.push_back(source.Gradient());
  }
  Planes expected = corrected;
  ASSERT_TRUE(AdamWUpdate(corrected.Span(0, 1000), g.data(), true, early));
  ASSERT_TRUE(AdamWCorrect(corrected.Span(0, 1000), g.data(), early, 0.001f));
  ASSERT_TRUE(AdamWUpdate(expected.Span(0, 1000), g.data(), true, clipped));
  EXPECT_EQ(corrected.m, expected.m);
  EXPECT_EQ(corrected.v, expected.v);
  for (int i = 0; i < 1000; ++i) {
    EXPECT_NEAR(corrected.p(i), expected.p(i), 0x1p-23 * (0.5 + 3e-4));
  }
}

TEST(AdamWTest, UndoGoesBackToRounding) {
  constexpr double u = 0x1p-24;
  std::mt19937 random(37);
  std::normal_distribution<float> weights(0, 0.05f), gradients(0, 1e-3f);
  for (uint64_t t : {1u, 2u, 10u, 1000u}) {
    const AdamWStep step = UsualStep(t, 1);
    for (int i = 0; i < 2000; ++i) {
      const bf16 g = FloatToBf16Even(i % 5 == 0 ? 0.0f : gradients(random));
      const double size = std::fabs(Bf16ToFloat(g));
      Planes planes;
      const float square = gradients(random);
      planes.Add(weights(random), gradients(random), square * square);
      const Planes start = planes;
      ASSERT_TRUE(AdamWUpdate(planes.Span(0, 1), &g, true, step));
      const double moved = std::fabs(planes.p(0) - start.p(0));
      if (size == 0) {
        ASSERT_TRUE(AdamWUndoZero(planes.Span(0, 1), true, step));
      } else {
        ASSERT_TRUE(AdamWUndo(planes.Span(0, 1), &g, true, step));
      }
      EXPECT_NEAR(planes.m[0], start.m[0],
                  6 * u * (std::fabs(start.m[0]) + size));
      EXPECT_NEAR(planes.v[0], start.v[0], 8 * u * (start.v[0] + size * size));
      EXPECT_NEAR(planes.p(0), start.p(0),
                  6 * u * (std::fabs(start.p(0)) + moved));
    }
  }
}

TEST(AdamWTest, OnlyConstantsFarFromZeroCanBeUndone) {
  EXPECT_TRUE(CanUndo(UsualStep(1, 1)));
  EXPECT_FALSE(CanUndo(MakeAdamWStep(1e-3, 0.0, 0.999, 1e-8, 0, 1, 1)));
  EXPECT_FALSE(CanUndo(MakeAdamWStep(1e-3, 0.9, 0.0, 1e-8, 0, 1, 1)));
  EXPECT_FALSE(CanUndo(MakeAdamWStep(1.0, 0.9, 0.999, 1e-8, 1.0, 1, 1)));
}

}  // namespace
}  // namespace slidedp::hostd
