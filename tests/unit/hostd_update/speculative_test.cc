// Speculative updates: what is done early ends as if it had been done late.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/backoff.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hostd/store/split.h"
#include "hostd/update/engine.h"
#include "tests/unit/hostd_update/early_fixture.h"
#include "tests/unit/hostd_update/fake_ranks.h"

namespace slidedp::hostd {
namespace {

using policy::GradRoute;
using policy::UpdateMode;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

// Chunks come at random moments, so that units arrive, are updated and are
// decided in many orders.
class RandomPauses {
 public:
  explicit RandomPauses(uint32_t seed) : random_(seed) {}

  Deviations deviations() {
    Deviations d;
    d.before_chunk = [this](int, uint64_t, uint64_t) {
      uint32_t spins;
      {
        std::lock_guard lock(mutex_);
        spins = random_() % 16 == 0 ? random_() % 20'000 : 0;
      }
      // Not a sleep: however busy the machine is, it must not take long.
      for (uint32_t i = 0; i < spins; ++i) asm volatile("");
      return true;
    };
    return d;
  }

 private:
  std::mutex mutex_;
  std::mt19937 random_;
};

JobOptions Speculative(GradRoute route, int ranks) {
  JobOptions options;
  options.mode = UpdateMode::kSpeculative;
  options.route = route;
  options.ranks = ranks;
  options.chunk_bytes = 1280;
  options.threads = 3;
  return options;
}

TEST(SpeculativeTest, EqualsDeferredBitwiseWhereNothingIsClipped) {
  for (GradRoute route : kRoutes) {
    for (int ranks : {1, 2}) {
      for (int percent : {100, 30}) {
        JobOptions options = Speculative(route, ranks);
        options.steps = 20;
        options.max_grad_norm = 1e6;
        options.used_rows_percent = percent;
        Job job(options, /*seed=*/ranks);
        const Snapshot start = Snapshot::Of(*job.state);
        for (uint64_t s = 0; s < options.steps; ++s) {
          job.versions.push_back(Reference(job, start, s).hi);
        }
        RandomPauses pauses(7);
        const Outcome outcome = RunJob(job, pauses.deviations());
        EXPECT_THAT(outcome.failures, IsEmpty());
        ASSERT_THAT(outcome.results, SizeIs(options.steps));
        for (const StepResult& result : outcome.results) {
          EXPECT_TRUE(result.speculated);
          EXPECT_EQ(result.clip_coefficient, 1);
        }
        EXPECT_EQ(outcome.torn_elements, 0u);
        EXPECT_TRUE(Snapshot::Of(*job.state) ==
                    Reference(job, start, options.steps));
      }
    }
  }
}

// Every other step is clipped: some units are updated before the norm is too
// large.
TEST(SpeculativeTest, IsWithinAMillionthOfDeferredAfterManyClippedSteps) {
  for (GradRoute route : kRoutes) {
    for (bool predicts : {true, false}) {
      JobOptions options = Speculative(route, 2);
      options.steps = 100;
      Job job(options);
      double head_norm = 0;  // of a step that is clipped
      for (bf16 g : job.script[0].gradients[0].back()) {
        head_norm += std::pow(Bf16ToFloat(g), 2);
      }
      job.config.max_grad_norm = 2 * std::sqrt(head_norm);
      if (!predicts) job.config.clipped_to_defer = kPredictorSteps + 1;
      const Snapshot start = Snapshot::Of(*job.state);
      RandomPauses pauses(11);
      const Outcome outcome = RunJob(job, pauses.deviations());
      EXPECT_THAT(outcome.failures, IsEmpty());
      ASSERT_THAT(outcome.results, SizeIs(options.steps));
      uint64_t clipped = 0, corrected = 0;
      double way = 0;  // of a weight that always moves by the learning rate
      for (const StepResult& result : outcome.results) {
        way += result.lr;
        clipped += result.clip_coefficient < 1;
        corrected += result.clip_coefficient < 1 && result.speculated;
      }
      EXPECT_EQ(clipped, options.steps / 2);
      if (predicts) {
        EXPECT_LT(corrected, clipped / 4);
      } else {
        EXPECT_EQ(corrected, clipped);
      }
      const Snapshot expected = Reference(job, start, options.steps);
      const Snapshot found = Snapshot::Of(*job.state);
      EXPECT_LE(RelativeDistance(found, expected), 1e-6);
      for (size_t i = 0; i < found.hi.size(); ++i) {
        // Of what the weight is, or of the way that it has gone.
        ASSERT_NEAR(Weight(found, i), Weight(expected, i),
                    1e-6 * std::max(way, std::fabs(Weight(expected, i))));
      }
    }
  }
}

TEST(SpeculativeTest, BitsDoNotDependOnArrivalsThreadsAndSlices) {
  for (GradRoute route : kRoutes) {
    std::optional<Snapshot> first;
    for (uint32_t variant = 0; variant < 6; ++variant) {
      JobOptions options = Speculative(route, 2);
      options.steps = 12;
      options.used_rows_percent = 40;
      options.threads = 1 + static_cast<int>(variant);
      options.slice_elements = variant % 2 == 0 ? 128 : 4096;
      options.chunk_bytes = variant < 3 ? 896 : 4096;
      Job job(options);
      job.config.clipped_to_defer = kPredictorSteps + 1;
      // Skipped, with units and rows to undo.
      job.script[5].gradients[0][1][3] = 0x7fc0;
      RandomPauses pauses(variant);
      const Outcome outcome = RunJob(job, pauses.deviations());
      EXPECT_THAT(outcome.failures, IsEmpty());
      ASSERT_THAT(outcome.results, SizeIs(options.steps));
      EXPECT_TRUE(outcome.results[5].skipped);
      const Snapshot found = Snapshot::Of(*job.state);
      if (!first.has_value()) first = found;
      EXPECT_TRUE(found == *first) << "variant " << variant;
    }
  }
}

TEST(SpeculativeTest, NonFiniteUnitIsSkippedAndEarlyUnitsGoBackToRounding) {
  for (GradRoute route : kRoutes) {
    JobOptions options = Speculative(route, 2);
    options.steps = 3;
    options.max_grad_norm = 1e6;
    Job job(options);
    job.script[2].gradients[0][0][5] = 0x7f80;  // the unit that comes last
    const Snapshot start = Snapshot::Of(*job.state);
    const Snapshot expected = Reference(job, start, options.steps);
    const Outcome outcome = RunJob(job);
    EXPECT_THAT(outcome.failures, IsEmpty());
    ASSERT_THAT(outcome.results, SizeIs(options.steps));
    EXPECT_TRUE(outcome.results[2].skipped);
    EXPECT_TRUE(outcome.results[2].speculated);
    EXPECT_THAT(outcome.results[2].skip_reason,
                HasSubstr("the gradient of unit 0 (embedding)"));
    const Snapshot found = Snapshot::Of(*job.state);
    EXPECT_FALSE(found == expected);  // to rounding, that is
    EXPECT_LE(RelativeDistance(found, expected), 5e-7);
  }
}

TEST(SpeculativeTest, LossThatIsNotFiniteIsSkippedWithoutAnUpdate) {
  JobOptions options = Speculative(GradRoute::kGpuSharded, 2);
  options.max_grad_norm = 1e6;
  Job job(options);
  job.script[1].loss_sums[1] = std::nan("");
  const Snapshot expected =
      Reference(job, Snapshot::Of(*job.state), options.steps);
  const Outcome outcome = RunJob(job);
  ASSERT_THAT(outcome.results, SizeIs(options.steps));
  EXPECT_TRUE(outcome.results[1].skipped);
  EXPECT_FALSE(outcome.results[1].speculated);
  EXPECT_TRUE(Snapshot::Of(*job.state) == expected);
}

TEST(SpeculativeTest, NothingIsPublishedOrFreedBeforeTheCoefficientIsKnown) {
  for (GradRoute route : {GradRoute::kGpuRoot, GradRoute::kGpuSharded}) {
    JobOptions options = Speculative(route, 2);
    options.steps = 2;
    options.max_grad_norm = 1e6;
    Job job(options);
    const Snapshot start = Snapshot::Of(*job.state);
    const int head = static_cast<int>(job.state->layout().units.size()) - 1;
    const PlaneSpan planes = job.state->planes(head, 0, 1);
    std::atomic<bool> early = false;
    std::atomic<int> published = 0;
    Deviations watch;
    watch.before_chunk = [&](int rank, uint64_t step, uint64_t chunk) {
      const uint64_t last = job.state->grad_schedule().chunks[rank].size() - 1;
      if (rank != 0 || step != 0 || chunk != last) return true;
      // The step's last chunk waits for the head's update.
      Backoff backoff;
      while (ReadShared(*job.state, planes.m) == 0) backoff.Pause();
      early = true;
      for (int u = 0; u <= head; ++u) {
        published += job.state->versions().param_version(u).load() > 0;
      }
      for (int r = 0; r < 2; ++r) {
        published += job.state->versions().grad_free(r).load() > 0;
      }
      return true;
    };
    const Outcome outcome = RunJob(job, watch);
    EXPECT_THAT(outcome.failures, IsEmpty());
    EXPECT_TRUE(early);
    EXPECT_EQ(published, 0);
    EXPECT_TRUE(Snapshot::Of(*job.state) ==
                Reference(job, start, options.steps));
  }
}

TEST(SpeculativeTest, FrequentClippingIsPredictedFromTheHistoryAlone) {
  JobOptions options = Speculative(GradRoute::kGpuRoot, 1);
  options.steps = 20;
  options.max_grad_norm = 1e-3;  // clips every step
  Job whole(options);
  const Outcome outcome = RunJob(whole);
  ASSERT_THAT(outcome.results, SizeIs(20));
  for (const StepResult& result : outcome.results) {
    EXPECT_LT(result.clip_coefficient, 1);
    EXPECT_EQ(result.clip_history, (uint64_t{2} << result.step) - 1);
  }
  // The head's norm alone is above the limit: nothing was speculated on.
  EXPECT_FALSE(outcome.results[0].speculated);

  options.max_grad_norm = 1e6;
  for (uint64_t history : {0x0fu, 0x07u, 0xf00u}) {
    Job job(options);
    job.config.clip_history = history;
    const Outcome found = RunJob(job);
    ASSERT_THAT(found.results, SizeIs(20));
    EXPECT_EQ(found.results[0].speculated, history != 0x0f);
    // The four clipped steps are too far back at last.
    EXPECT_TRUE(found.results[6].speculated);
  }
}

TEST(SpeculativeTest, IsDeferredWhereAnUpdateCannotBeUndone) {
  JobOptions options = Speculative(GradRoute::kGpuRoot, 1);
  options.max_grad_norm = 1e6;
  options.used_rows_percent = 30;
  Job job(options);
  job.config.beta1 = 0;
  job.script[2].gradients[0][0][5] = 0x7fc0;
  const Snapshot expected =
      Reference(job, Snapshot::Of(*job.state), options.steps);
  const Outcome outcome = RunJob(job);
  ASSERT_THAT(outcome.results, SizeIs(options.steps));
  for (const StepResult& result : outcome.results) {
    EXPECT_FALSE(result.speculated);
  }
  EXPECT_TRUE(Snapshot::Of(*job.state) == expected);
}

}  // namespace
}  // namespace slidedp::hostd
