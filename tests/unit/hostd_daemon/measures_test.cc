// What is made of a step's numbers.
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hostd/daemon/early_stop.h"
#include "hostd/daemon/loss_watch.h"
#include "hostd/daemon/run_memory.h"
#include "hostd/daemon/step_measures.h"
#include "policy/peak_rates.h"
#include "tests/testing/status_matchers.h"

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

// Steps and evaluations of a job with all that a run remembers.
class RunMemoryTest : public ::testing::Test {
 protected:
  RunMemoryTest() {
    spec_.set_loss_spike_sigma(3);
    spec_.mutable_early_stop()->set_patience(4);
    spec_.mutable_early_stop()->set_min_delta(0.05);
    spec_.mutable_eval()->set_max_sequences(16);
    std::mt19937 random(1);
    std::normal_distribution<double> normal(2, 0.2);
    for (double& loss : losses_) loss = normal(random);
    for (size_t i = 20; i < kSteps; i += 17) losses_[i] = 9;  // stands out
    for (double& loss : evaluations_) loss = normal(random);
  }
  // What a run decides at every step from `first` on.
  std::vector<std::string> Run(RunMemory& memory, uint64_t first,
                               uint64_t last = kSteps) const {
    std::vector<std::string> said;
    for (uint64_t step = first; step <= last; ++step) {
      // Before the first step and after each.
      if (step > first) {
        StepResult result = {};
        result.step = step - 1;
        result.loss = losses_[step - 1];
        result.skipped = result.not_finite = step % 7 < 2;
        const auto spike = memory.AddStep(result);
        said.push_back(absl::StrCat(
            step, spike.has_value() ? " stands out " : " ",
            spike.has_value() ? spike->mean : 0, memory.skipped_in_a_row()));
      }
      if (step == last && last < kSteps) break;  // its evaluation comes later
      const bool best = memory.AddEvaluation(step, evaluations_[step]);
      const EarlyStop& all = memory.evaluations();
      said.push_back(absl::StrCat(step, best ? " best " : " ", all.best_step(),
                                  all.should_stop() ? " stop" : "",
                                  all.since_better()));
    }
    return said;
  }

  static constexpr uint64_t kSteps = 100;
  v1::JobSpec spec_;
  double losses_[kSteps], evaluations_[kSteps + 1];
};

TEST_F(RunMemoryTest, AJobThatGoesOnDecidesAsIfItHadNeverStopped) {
  RunMemory whole(spec_);
  EXPECT_TRUE(whole.Begin(0, {}));
  const std::vector<std::string> all = Run(whole, 0);
  for (uint64_t cut = 1; cut < kSteps; ++cut) {
    RunMemory before(spec_), after(spec_);
    before.Begin(0, {});
    std::vector<std::string> said = Run(before, 0, cut);
    // Through a manifest, asked for a little later.
    checkpoint::Manifest manifest;
    manifest.files = {{"a", 1, 2}};
    before.AddEvaluation(cut, 0.1);
    manifest.memory = before.After(cut).value();
    const auto read =
        checkpoint::ParseManifest(checkpoint::ToJson(manifest), "m");
    ASSERT_OK(read);
    EXPECT_TRUE(after.Begin(cut, read->memory));
    for (const std::string& words : Run(after, cut)) said.push_back(words);
    ASSERT_EQ(said, all) << cut;
  }
  // The comparison sees what it is there to see.
  RunMemory forgetful(spec_);
  forgetful.Begin(50, {});
  const std::vector<std::string> anew = Run(forgetful, 50);
  EXPECT_FALSE(std::equal(anew.rbegin(), anew.rend(), all.rbegin()));
}

TEST_F(RunMemoryTest, OtherHeldOutSequencesAreNoMeasure) {
  RunMemory before(spec_);
  before.Begin(0, {});
  Run(before, 0, 10);
  const checkpoint::Memory memory = before.After(10).value();
  EXPECT_FALSE(before.After(11).has_value());
  spec_.mutable_eval()->set_max_sequences(32);
  RunMemory after(spec_);
  EXPECT_FALSE(after.Begin(10, memory));
  EXPECT_FALSE(after.evaluations().best_loss().has_value());
  EXPECT_EQ(after.skipped_in_a_row(), before.skipped_in_a_row());
}

}  // namespace
}  // namespace slidedp::hostd
