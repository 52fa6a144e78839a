// AdamW: every SIMD target equals the scalar reference bit for bit, and the
// scalar reference is close to the formula in double.
#include "hostd/update/adamw.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "hostd/store/split.h"
#include "hwy/targets.h"

namespace slidedp::hostd {
namespace {

constexpr uint64_t kMargin = 32;  // elements on both sides that must not change

// Planes and gradients on the heap, so that ASan sees a step over the end.
struct Planes {
  std::vector<bf16> hi;
  std::vector<int16_t> lo;
  std::vector<float> m, v;

  PlaneSpan Span(uint64_t begin, uint64_t count) {
    return {hi.data() + begin, lo.data() + begin, m.data() + begin,
            v.data() + begin, count};
  }
  void Add(float p, float m_value, float v_value) {
    bf16 h;
    int16_t l;
    SplitFloat(p, h, l);
    hi.push_back(h);
    lo.push_back(l);
    m.push_back(m_value);
    v.push_back(v_value);
  }
  float p(uint64_t i) const { return JoinFloat(hi[i], lo[i]); }
};

::testing::AssertionResult SameBits(const Planes& a, const Planes& b) {
  for (uint64_t i = 0; i < a.hi.size(); ++i) {
    if (a.hi[i] != b.hi[i] || a.lo[i] != b.lo[i] ||
        std::bit_cast<uint32_t>(a.m[i]) != std::bit_cast<uint32_t>(b.m[i]) ||
        std::bit_cast<uint32_t>(a.v[i]) != std::bit_cast<uint32_t>(b.v[i])) {
      return ::testing::AssertionFailure()
             << "element " << i << ": p " << a.p(i) << " / " << b.p(i) << ", m "
             << a.m[i] << " / " << b.m[i] << ", v " << a.v[i] << " / "
             << b.v[i];
    }
  }
  return ::testing::AssertionSuccess();
}

enum class Values { kUsual, kDenormal, kHuge, kAnyBits };

class Source {
 public:
  Source(Values values, uint32_t seed) : values_(values), random_(seed) {}

  float Finite() {
    for (;;) {
      float x = 0;
      switch (values_) {
        case Values::kUsual:
          x = std::normal_distribution<float>(0, 0.05f)(random_);
          break;
        case Values::kDenormal:
          x = std::bit_cast<float>(
              static_cast<uint32_t>(random_() & 0x80ffffffu));
          break;
        case Values::kHuge:
          x = std::bit_cast<float>(
              static_cast<uint32_t>((random_() & 0x80ffffffu) | 0x7e000000u));
          break;
        case Values::kAnyBits:
          x = std::bit_cast<float>(static_cast<uint32_t>(random_()));
          break;
      }
      if (Splittable(x)) return x;
    }
  }
  // Any bfloat16; NaN and infinity among them for kAnyBits.
  bf16 Gradient() {
    return values_ == Values::kAnyBits ? static_cast<bf16>(random_())
                                       : FloatToBf16Even(Finite());
  }
  Planes MakePlanes(uint64_t count) {
    Planes planes;
    for (uint64_t i = 0; i < count; ++i) {
      const float p = Finite(), m = Finite();
      planes.Add(p, m, std::fabs(Finite()));
    }
    return planes;
  }

 private:
  Values values_;
  std::mt19937 random_;
};

AdamWStep UsualStep(uint64_t t, double grad_scale) {
  return MakeAdamWStep(3e-4, 0.9, 0.999, 1e-8, 0.1, t, grad_scale);
}

// The targets that were compiled and that this CPU has.
std::vector<int64_t> Targets() {
  std::vector<int64_t> targets;
  const int64_t supported = hwy::SupportedTargets();
  for (int64_t bit = 1; bit > 0; bit <<= 1) {
    if (supported & bit) targets.push_back(bit);
  }
  return targets;
}

class AdamWTargetTest : public ::testing::Test {
 protected:
  void Choose(int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  void TearDown() override {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().DeInit();
  }

  // One update of the same range by the chosen target and by the reference.
  template <typename G>
  void ExpectSameAsScalar(const Planes& start, const std::vector<G>& g,
                          uint64_t offset, uint64_t count, bool decay,
                          const AdamWStep& step) {
    Planes simd = start, scalar = start;
    const bool simd_ok =
        AdamWUpdate(simd.Span(offset, count), g.data(), decay, step);
    const bool scalar_ok =
        AdamWUpdateScalar(scalar.Span(offset, count), g.data(), decay, step);
    EXPECT_EQ(simd_ok, scalar_ok);
    EXPECT_TRUE(SameBits(simd, scalar))
        << AdamWTargetName() << ", count " << count << ", offset " << offset;
  }
};

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

// Aligned and not, whole vectors and tails: stores past the caches change no
// bit, and nothing beside the range.
TEST_F(AdamWTargetTest, StreamingStoresChangeNoBit) {
  constexpr uint64_t kCount = 512;
  struct alignas(64) Aligned {
    bf16 hi[kCount];
    int16_t lo[kCount];
    float m[kCount], v[kCount];
    PlaneSpan Span(uint64_t begin, uint64_t count) {
      return {hi + begin, lo + begin, m + begin, v + begin, count};
    }
    bool operator==(const Aligned& other) const {
      return std::memcmp(this, &other, sizeof(*this)) == 0;
    }
  };
  for (int64_t target : Targets()) {
    Choose(target);
    Source source(Values::kUsual, 23);
    const Planes start = source.MakePlanes(kCount);
    Aligned aligned;
    std::copy(start.hi.begin(), start.hi.end(), aligned.hi);
    std::copy(start.lo.begin(), start.lo.end(), aligned.lo);
    std::copy(start.m.begin(), start.m.end(), aligned.m);
    std::copy(start.v.begin(), start.v.end(), aligned.v);
    std::vector<bf16> g;
    for (uint64_t i = 0; i < kCount; ++i) g.push_back(source.Gradient());
    for (uint64_t begin : {0u, 32u, 64u, 7u}) {
      for (uint64_t count : {1u, 16u, 33u, 64u, 333u}) {
        AdamWStep step = UsualStep(2, 1);
        Aligned plain = aligned, streamed = aligned;
        ASSERT_TRUE(
            AdamWUpdate(plain.Span(begin, count), g.data(), true, step));
        ASSERT_TRUE(
            AdamWCorrect(plain.Span(begin, count), g.data(), step, 0.5f));
        step.streaming = true;
        ASSERT_TRUE(
            AdamWUpdate(streamed.Span(begin, count), g.data(), true, step));
        ASSERT_TRUE(
            AdamWCorrect(streamed.Span(begin, count), g.data(), step, 0.5f));
        EXPECT_TRUE(plain == streamed)
            << AdamWTargetName() << ", " << begin << " + " << count;
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
