// Learning-rate factors against values worked out by hand from transformers'
// formulas, and against what those give (tests/references/lr_schedules.py).
#include "policy/lr_schedule.h"

#include <cmath>
#include <vector>

#include "gtest/gtest.h"

namespace slidedp::policy {
namespace {

TEST(LrScheduleTest, LinearRisesThenFallsToZero) {
  const LrSchedule s = {LrScheduleKind::kLinear, 4, 12, 0};
  EXPECT_EQ(LrFactor(s, 0), 0.0);  // as in transformers, with warm-up
  EXPECT_EQ(LrFactor(s, 1), 0.25);
  EXPECT_EQ(LrFactor(s, 3), 0.75);
  EXPECT_EQ(LrFactor(s, 4), 1.0);
  EXPECT_EQ(LrFactor(s, 6), 0.75);
  EXPECT_EQ(LrFactor(s, 11), 0.125);
  EXPECT_EQ(LrFactor(s, 12), 0.0);
  EXPECT_EQ(LrFactor(s, 100), 0.0);
}

TEST(LrScheduleTest, LinearWithoutWarmupStartsAtThePeak) {
  const LrSchedule s = {LrScheduleKind::kLinear, 0, 5, 0};
  EXPECT_EQ(LrFactor(s, 0), 1.0);
  EXPECT_DOUBLE_EQ(LrFactor(s, 1), 0.8);
  EXPECT_DOUBLE_EQ(LrFactor(s, 4), 0.2);
}

TEST(LrScheduleTest, ConstantIsConstantAfterWarmup) {
  const LrSchedule plain = {LrScheduleKind::kConstant, 0, 10, 0};
  EXPECT_EQ(LrFactor(plain, 0), 1.0);
  EXPECT_EQ(LrFactor(plain, 9), 1.0);
  const LrSchedule warm = {LrScheduleKind::kConstant, 2, 10, 0};
  EXPECT_EQ(LrFactor(warm, 0), 0.0);
  EXPECT_EQ(LrFactor(warm, 1), 0.5);
  EXPECT_EQ(LrFactor(warm, 2), 1.0);
  EXPECT_EQ(LrFactor(warm, 1000), 1.0);
}

TEST(LrScheduleTest, CosineFallsFromThePeakToZero) {
  const LrSchedule s = {LrScheduleKind::kCosine, 2, 10, 0};
  EXPECT_EQ(LrFactor(s, 1), 0.5);
  EXPECT_EQ(LrFactor(s, 2), 1.0);
  EXPECT_DOUBLE_EQ(LrFactor(s, 4), 0.5 * (1 + std::sqrt(0.5)));
  EXPECT_DOUBLE_EQ(LrFactor(s, 6), 0.5);
  EXPECT_NEAR(LrFactor(s, 8), 0.14644660940672624, 1e-15);
  EXPECT_EQ(LrFactor(s, 10), 0.0);
}

TEST(LrScheduleTest, CosineFloorIsAShareOfThePeakAndNotOfTheWarmup) {
  const LrSchedule s = {LrScheduleKind::kCosine, 2, 10, 0.1};
  EXPECT_EQ(LrFactor(s, 0), 0.0);
  EXPECT_EQ(LrFactor(s, 2), 1.0);
  EXPECT_DOUBLE_EQ(LrFactor(s, 6), 0.55);
  EXPECT_DOUBLE_EQ(LrFactor(s, 10), 0.1);
}

struct Reference {
  LrSchedule schedule;
  std::vector<double> factors;  // of step 0, 1, ...
};

// transformers' own functions.
TEST(LrScheduleTest, EqualsTransformers) {
  const Reference references[] = {
#include "tests/unit/policy/lr_schedule_reference.inc"
  };
  for (const Reference& reference : references) {
    for (size_t s = 0; s < reference.factors.size(); ++s) {
      EXPECT_NEAR(LrFactor(reference.schedule, s), reference.factors[s], 1e-15)
          << "kind " << static_cast<int>(reference.schedule.kind) << " warm-up "
          << reference.schedule.warmup_steps << " step " << s;
    }
  }
}

TEST(LrScheduleTest, WsdIsStableBetweenWarmupAndDecay) {
  LrSchedule s = {LrScheduleKind::kWsd, 2, 12, 0, 4, LrDecay::kLinear};
  EXPECT_EQ(LrFactor(s, 1), 0.5);
  for (uint64_t step = 2; step <= 8; ++step) EXPECT_EQ(LrFactor(s, step), 1.0);
  EXPECT_EQ(LrFactor(s, 10), 0.5);
  EXPECT_EQ(LrFactor(s, 11), 0.25);
  s.decay = LrDecay::kOneMinusSqrt;
  EXPECT_EQ(LrFactor(s, 9), 0.5);
}

TEST(LrScheduleTest, WarmupLongerThanTheJobStaysInWarmup) {
  for (LrScheduleKind kind :
       {LrScheduleKind::kLinear, LrScheduleKind::kConstant,
        LrScheduleKind::kCosine}) {
    const LrSchedule s = {kind, 100, 10, 0};
    EXPECT_EQ(LrFactor(s, 9), 0.09);
    EXPECT_TRUE(std::isfinite(LrFactor(s, 100)));
  }
}

TEST(LrScheduleTest, JobOfNoOrOneStepHasAFiniteFactor) {
  for (LrScheduleKind kind :
       {LrScheduleKind::kLinear, LrScheduleKind::kConstant,
        LrScheduleKind::kCosine}) {
    for (uint64_t total : {0u, 1u}) {
      const double factor = LrFactor({kind, 0, total, 0}, 0);
      EXPECT_GE(factor, 0.0);
      EXPECT_LE(factor, 1.0);
    }
    EXPECT_EQ(LrFactor({kind, 0, 1, 0}, 0), 1.0);
  }
}

}  // namespace
}  // namespace slidedp::policy
