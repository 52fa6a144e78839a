// What is made of a step's numbers.
#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hostd/daemon/early_stop.h"
#include "hostd/daemon/loss_watch.h"
#include "hostd/daemon/step_measures.h"
#include "policy/peak_rates.h"

namespace slidedp::hostd {
namespace {

const double kNan = std::nan("");

TEST(LossWatchTest, ALossAboveMeanPlusSigmaDeviationsStandsOut) {
  LossWatch watch(3);
  // Mean 2, deviation 0.5.
  for (size_t i = 0; i < LossWatch::kLeast; ++i) {
    EXPECT_FALSE(watch.Add(i % 2 == 0 ? 1.5 : 2.5).has_value());
  }
  EXPECT_FALSE(watch.Add(3.49).has_value());
  const auto spike = watch.Add(10);
  ASSERT_TRUE(spike.has_value());
  EXPECT_NEAR(spike->mean, 2.09, 0.01);
  EXPECT_GT(spike->deviation, 0.5);
  EXPECT_FALSE(watch.Add(-10).has_value());
}

TEST(LossWatchTest, SaysNothingEarlyOrWhenOff) {
  LossWatch early(3), off(0);
  for (size_t i = 0; i + 1 < LossWatch::kLeast; ++i) early.Add(1);
  EXPECT_FALSE(early.Add(100).has_value());
  for (size_t i = 0; i < 100; ++i) off.Add(1);
  EXPECT_FALSE(off.Add(100).has_value());
}

TEST(LossWatchTest, NoiseOfAFlatCurveAndNansAreNoNews) {
  LossWatch watch(6);
  for (size_t i = 0; i < 100; ++i) EXPECT_FALSE(watch.Add(1).has_value());
  EXPECT_FALSE(watch.Add(1.005).has_value());
  EXPECT_FALSE(watch.Add(kNan).has_value());
  EXPECT_TRUE(watch.Add(1.02).has_value());
}

TEST(LossWatchTest, ANewLevelIsAcceptedInTheEnd) {
  LossWatch watch(6);
  for (size_t i = 0; i < 64; ++i) watch.Add(1);
  size_t spikes = 0;
  for (size_t i = 0; i < 64; ++i) spikes += watch.Add(5).has_value();
  EXPECT_GE(spikes, 1u);
  EXPECT_LE(spikes, 4u);
}

TEST(EarlyStopTest, PatienceCountsEvaluationsThatWereNotLower) {
  EarlyStop stop(2, 0.1);
  EXPECT_TRUE(stop.Add(0, 3));
  EXPECT_TRUE(stop.Add(10, 2));
  EXPECT_TRUE(stop.Add(20, 1.95));  // the best, but not by min_delta
  EXPECT_FALSE(stop.should_stop());
  EXPECT_FALSE(stop.Add(30, kNan));
  EXPECT_TRUE(stop.should_stop());
  EXPECT_EQ(stop.best_loss(), 1.95);
  EXPECT_EQ(stop.best_step(), 20u);
  EXPECT_EQ(stop.since_better(), 2u);
}

TEST(EarlyStopTest, SlowImprovementAddsUp) {
  EarlyStop stop(2, 0.1);
  for (double loss : {2.0, 1.95, 1.89, 1.84, 1.78}) {
    stop.Add(0, loss);
    EXPECT_FALSE(stop.should_stop()) << loss;
  }
}

TEST(EarlyStopTest, PatienceZeroNeverStops) {
  EarlyStop stop(0, 0);
  for (int i = 0; i < 100; ++i) stop.Add(i, 1);
  EXPECT_FALSE(stop.should_stop());
}

StepResult Result(uint64_t step, int64_t begin_ns, int64_t end_ns) {
  StepResult result = {};
  result.step = step;
  result.loss = 1;
  result.begin_ns = begin_ns;
  result.end_ns = end_ns;
  return result;
}

TEST(StepMeasuresTest, RatesAreOverTheDistanceToTheStepBefore) {
  StepMeasures::Job job;
  job.tokens = 1000;
  job.flops = 4e12;
  job.peak_flops_per_second = 2e13;
  StepMeasures measures(job);
  constexpr int64_t kMs = 1'000'000;
  const v1::StepRecord first = measures.Next(Result(0, 1000 * kMs, 2000 * kMs));
  EXPECT_EQ(first.step(), 1u);
  EXPECT_DOUBLE_EQ(first.tokens_per_second(), 1000);
  EXPECT_DOUBLE_EQ(first.mfu(), 0.2);
  // It began while the one before was still being applied.
  const v1::StepRecord second =
      measures.Next(Result(1, 1600 * kMs, 2500 * kMs));
  EXPECT_DOUBLE_EQ(second.seconds(), 0.9);
  EXPECT_DOUBLE_EQ(second.tokens_per_second(), 2000);
  EXPECT_DOUBLE_EQ(second.mfu(), 0.4);
  measures.Interrupted();
  const v1::StepRecord third = measures.Next(Result(2, 9000 * kMs, 9500 * kMs));
  EXPECT_DOUBLE_EQ(third.tokens_per_second(), 2000);
}

TEST(StepMeasuresTest, NoMfuOfAnUnknownGpu) {
  StepMeasures measures({1000, 4e12, 0});
  EXPECT_FALSE(measures.Next(Result(0, 1, 1'000'000)).has_mfu());
}

TEST(PeakRatesTest, NamesAsDriversGiveThem) {
  using policy::PeakBf16FlopsPerSecond;
  EXPECT_EQ(PeakBf16FlopsPerSecond("NVIDIA H200 (sm_90)"), 989.4e12);
  EXPECT_EQ(PeakBf16FlopsPerSecond("NVIDIA H100 PCIe (sm_90)"), 756e12);
  EXPECT_EQ(PeakBf16FlopsPerSecond("NVIDIA H100 80GB HBM3 (sm_90)"), 989.4e12);
  EXPECT_EQ(PeakBf16FlopsPerSecond("NVIDIA GeForce RTX 4090 (sm_89)"),
            165.2e12);
  EXPECT_EQ(PeakBf16FlopsPerSecond("NVIDIA A100-SXM4-80GB (sm_80)"), 312e12);
  EXPECT_EQ(PeakBf16FlopsPerSecond("NVIDIA L40S (sm_89)"), 362e12);
  EXPECT_EQ(PeakBf16FlopsPerSecond("a GPU to come"), 0);
  EXPECT_EQ(PeakBf16FlopsPerSecond(""), 0);
}

}  // namespace
}  // namespace slidedp::hostd
