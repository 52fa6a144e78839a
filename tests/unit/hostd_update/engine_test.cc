// The update engine against ranks that behave: every route and mode gives the
// reference's bits, whatever the chunks, rings and threads.
#include "hostd/update/engine.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/hostd_update/expect_reference.h"
#include "tests/unit/hostd_update/fake_ranks.h"

namespace slidedp::hostd {
namespace {

using ::testing::Combine;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::Values;

class EngineRouteTest
    : public ::testing::TestWithParam<
          std::tuple<int, policy::GradRoute, policy::UpdateMode>> {
 protected:
  JobOptions Options() const {
    JobOptions options;
    std::tie(options.ranks, options.route, options.mode) = GetParam();
    return options;
  }
};

TEST_P(EngineRouteTest, EqualsTheReferenceForAllChunksRingsAndThreads) {
  // 128 bytes: 64 elements, the smallest. 1 MiB: a unit is one chunk.
  for (uint64_t chunk_bytes : {128u, 896u, 1u << 20}) {
    JobOptions options = Options();
    options.chunk_bytes = chunk_bytes;
    options.own_chunks = chunk_bytes == 1u << 20 ? 1 : 4;
    options.ring_chunks = chunk_bytes == 896 ? 1 : 5;
    options.threads = chunk_bytes == 128 ? 3 : 1;
    ExpectReference(options);
  }
}

TEST_P(EngineRouteTest, EqualsTheReferenceWithATiedHead) {
  JobOptions options = Options();
  options.tied = true;
  ExpectReference(options);
}

TEST_P(EngineRouteTest, StepWithoutTokensChangesNoPlane) {
  JobOptions options = Options();
  Job job(options);
  job.script[0].valid_tokens = 0;
  job.script[3].valid_tokens = 0;
  const Snapshot expected =
      Reference(job, Snapshot::Of(*job.state), options.steps);
  const Outcome outcome = RunJob(job);
  EXPECT_THAT(outcome.failures, IsEmpty());
  ASSERT_THAT(outcome.results, SizeIs(options.steps));
  EXPECT_TRUE(outcome.results[3].skipped);
  EXPECT_EQ(outcome.results[3].skip_reason, "no valid tokens");
  EXPECT_TRUE(std::isnan(outcome.results[3].loss));
  EXPECT_EQ(outcome.results[3].grad_norm, 0);
  EXPECT_FALSE(outcome.results[4].skipped);
  EXPECT_TRUE(Snapshot::Of(*job.state) == expected);
}

std::string RouteName(
    const ::testing::TestParamInfo<EngineRouteTest::ParamType>& info) {
  const auto& [ranks, route, mode] = info.param;
  return absl::StrCat("Ranks", ranks, "_", policy::Name(route), "_",
                      policy::Name(mode));
}

INSTANTIATE_TEST_SUITE_P(
    All, EngineRouteTest,
    Combine(Values(1, 2, 3),
            Values(policy::GradRoute::kGpuRoot, policy::GradRoute::kGpuSharded,
                   policy::GradRoute::kCpu),
            Values(policy::UpdateMode::kEager, policy::UpdateMode::kDeferred)),
    RouteName);

TEST(EngineTest, RoutesMayDifferByUnitKind) {
  for (policy::UpdateMode mode :
       {policy::UpdateMode::kEager, policy::UpdateMode::kDeferred}) {
    JobOptions options;
    options.ranks = 3;
    options.mode = mode;
    options.route = policy::GradRoute::kCpu;
    options.decoder_route = policy::GradRoute::kGpuSharded;
    ExpectReference(options);
    options.route = policy::GradRoute::kGpuRoot;
    options.decoder_route = policy::GradRoute::kCpu;
    ExpectReference(options);
  }
}

TEST(EngineTest, ReportsEachStepInOrderWithItsNumbers) {
  JobOptions options;
  options.ranks = 2;
  options.route = policy::GradRoute::kCpu;
  Job job(options);
  const Outcome outcome = RunJob(job);
  ASSERT_THAT(outcome.results, SizeIs(options.steps));
  for (uint64_t s = 0; s < options.steps; ++s) {
    const StepResult& result = outcome.results[s];
    EXPECT_EQ(result.step, s);
    EXPECT_EQ(result.valid_tokens, 100u);
    EXPECT_DOUBLE_EQ(result.loss, (210.0 + 2.0 * s) / 100);
    EXPECT_DOUBLE_EQ(result.lr,
                     1e-2 * policy::LrFactor(job.config.schedule, s));
    EXPECT_FALSE(result.skipped);
    EXPECT_EQ(result.skip_reason, "");
    // The script's odd steps are below the clip norm.
    if (s % 2 == 1) {
      EXPECT_LT(result.grad_norm, options.max_grad_norm);
      EXPECT_EQ(result.clip_coefficient, 1);
    } else {
      EXPECT_GT(result.grad_norm, options.max_grad_norm);
      EXPECT_NEAR(result.clip_coefficient * result.grad_norm,
                  options.max_grad_norm, 1e-5);
    }
    EXPECT_EQ(result.deliver_ns, 2);
    EXPECT_EQ(result.compute_ns, 11);
    EXPECT_EQ(result.reduce_ns, 101);
    EXPECT_EQ(result.drain_ns, 1001);
    EXPECT_EQ(result.stall_ns, 10001);
    EXPECT_EQ(result.offload_ns, 100001);
    EXPECT_EQ(result.offload_wait_ns, 1000001);
    EXPECT_GT(result.update_ns, 0);
    EXPECT_GE(result.end_ns, result.begin_ns);
  }
}

TEST(EngineTest, GradNormIsTheSameOnAllRoutesAndModes) {
  // With one rank every route drains the same values.
  std::vector<double> norms;
  for (policy::UpdateMode mode :
       {policy::UpdateMode::kEager, policy::UpdateMode::kDeferred}) {
    for (policy::GradRoute route :
         {policy::GradRoute::kGpuRoot, policy::GradRoute::kGpuSharded,
          policy::GradRoute::kCpu}) {
      JobOptions options;
      options.mode = mode;
      options.route = route;
      Job job(options);
      const Outcome outcome = RunJob(job);
      ASSERT_THAT(outcome.results, SizeIs(options.steps));
      norms.push_back(outcome.results[2].grad_norm);
    }
  }
  EXPECT_GT(norms[0], 0);
  EXPECT_THAT(norms, ::testing::Each(norms[0]));
}

TEST(EngineTest, HostSummedNormIsOfTheRoundedSumInBothModes) {
  JobOptions options;
  options.ranks = 3;
  options.route = policy::GradRoute::kCpu;
  Job job(options);
  double square_norm = 0;
  for (size_t u = 0; u < job.state->layout().units.size(); ++u) {
    for (size_t i = 0; i < job.script[0].gradients[0][u].size(); ++i) {
      float sum = 0;
      for (int r = 0; r < 3; ++r) {
        sum += Bf16ToFloat(job.script[0].gradients[r][u][i]);
      }
      const double g = Bf16ToFloat(FloatToBf16Even(sum));
      square_norm += g * g;
    }
  }
  const Outcome outcome = RunJob(job);
  ASSERT_THAT(outcome.results, SizeIs(options.steps));
  EXPECT_EQ(outcome.results[0].grad_norm, std::sqrt(square_norm));

  options.mode = policy::UpdateMode::kEager;  // unrounded sum
  Job eager(options);
  const Outcome eager_outcome = RunJob(eager);
  ASSERT_THAT(eager_outcome.results, SizeIs(options.steps));
  EXPECT_NEAR(eager_outcome.results[0].grad_norm, std::sqrt(square_norm),
              1e-3 * std::sqrt(square_norm));
}

class EagerSlotsTest : public ::testing::TestWithParam<uint64_t> {};

TEST_P(EagerSlotsTest, MayBeFewerThanAStepHasChunks) {
  JobOptions options;
  options.ranks = 2;
  options.mode = policy::UpdateMode::kEager;
  options.route = policy::GradRoute::kGpuSharded;
  options.chunk_bytes = 256;
  options.own_chunks = GetParam();
  options.ring_chunks = 2;
  Job job(options);
  for (int r = 0; r < 2; ++r) {
    ASSERT_GT(job.state->grad_schedule().chunks[r].size(),
              4 * job.state->grad_schedule().slots(r));
  }
  // A rank never has more chunks out than its slots hold.
  Deviations watch;
  std::atomic<uint64_t> overruns = 0;
  watch.before_chunk = [&](int rank, uint64_t step, uint64_t chunk) {
    const policy::GradSchedule& schedule = job.state->grad_schedule();
    const uint64_t begin = step * schedule.chunks[rank].size();
    const uint64_t free = job.state->versions().grad_free(rank).load() - begin;
    if (chunk >= schedule.WrittenAtMost(rank, free) ||
        free > std::max(chunk, schedule.own[rank])) {
      ++overruns;
    }
    return true;
  };
  const Outcome outcome = RunJob(job, watch);
  EXPECT_THAT(outcome.failures, IsEmpty());
  EXPECT_EQ(overruns.load(), 0u);
}
INSTANTIATE_TEST_SUITE_P(Own, EagerSlotsTest, Values(0, 1, 3));

TEST(EngineTest, NanInOneGradientSkipsTheStepAndChangesNoPlane) {
  for (policy::GradRoute route :
       {policy::GradRoute::kGpuRoot, policy::GradRoute::kGpuSharded,
        policy::GradRoute::kCpu}) {
    for (bf16 bad : {bf16{0x7fc0}, bf16{0x7f80}}) {
      JobOptions options;
      options.ranks = 2;
      options.route = route;
      Job job(options);
      const int rank = route == policy::GradRoute::kCpu ? 1 : 0;
      for (uint64_t s : {0, 2}) job.script[s].gradients[rank][2][7] = bad;
      const Snapshot expected =
          Reference(job, Snapshot::Of(*job.state), options.steps);
      const Outcome outcome = RunJob(job);
      EXPECT_THAT(outcome.failures, IsEmpty());
      ASSERT_THAT(outcome.results, SizeIs(options.steps));
      for (uint64_t s = 0; s < options.steps; ++s) {
        EXPECT_EQ(outcome.results[s].skipped, s == 0 || s == 2);
      }
      EXPECT_THAT(outcome.results[2].skip_reason,
                  HasSubstr("the gradient of unit 2 (decoder layer 1) is not "
                            "finite"));
      EXPECT_FALSE(std::isfinite(outcome.results[2].grad_norm));
      // Reference() applies no update in steps 0 and 2, and counts none.
      EXPECT_TRUE(Snapshot::Of(*job.state) == expected);
    }
  }
}

// A rank's norm that is not finite decides before the chunks are summed.
TEST(EngineTest, SkippedStepFreesChunksThatWereNotSummed) {
  JobOptions options;
  options.ranks = 2;
  options.route = policy::GradRoute::kCpu;
  options.chunk_bytes = 128;
  options.threads = 1;
  options.steps = 12;
  Job job(options);
  for (StepScript& step : job.script) step.gradients[1][0][7] = 0x7fc0;
  const Snapshot start = Snapshot::Of(*job.state);
  const Outcome outcome = RunJob(job);
  EXPECT_THAT(outcome.failures, IsEmpty());
  ASSERT_THAT(outcome.results, SizeIs(options.steps));
  EXPECT_EQ(job.state->versions().grad_free(1).load(),
            options.steps * job.state->grad_schedule().chunks[1].size());
  EXPECT_TRUE(Snapshot::Of(*job.state) == start);
}

TEST(EngineTest, SumThatOverflowsSkipsTheStep) {
  JobOptions options;
  options.ranks = 2;
  options.route = policy::GradRoute::kCpu;
  options.steps = 1;
  Job job(options);
  for (int r = 0; r < 2; ++r) job.script[0].gradients[r][1][0] = 0x7f7f;
  const Snapshot start = Snapshot::Of(*job.state);
  const Outcome outcome = RunJob(job);
  ASSERT_THAT(outcome.results, SizeIs(1));
  EXPECT_TRUE(outcome.results[0].skipped);
  EXPECT_THAT(outcome.results[0].skip_reason, HasSubstr("unit 1"));
  EXPECT_TRUE(Snapshot::Of(*job.state) == start);
}

TEST(EngineTest, LossThatIsNotFiniteSkipsADeferredStep) {
  JobOptions options;
  options.ranks = 2;
  Job job(options);
  job.script[1].loss_sums[1] = std::nan("");
  const Snapshot expected =
      Reference(job, Snapshot::Of(*job.state), options.steps);
  const Outcome outcome = RunJob(job);
  ASSERT_THAT(outcome.results, SizeIs(options.steps));
  EXPECT_TRUE(outcome.results[1].skipped);
  EXPECT_EQ(outcome.results[1].skip_reason, "the loss of rank 1 is not finite");
  EXPECT_TRUE(Snapshot::Of(*job.state) == expected);
}

TEST(EngineTest, NoClippingWhenMaxGradNormIsZero) {
  JobOptions options;
  options.max_grad_norm = 0;
  Job job(options);
  const Snapshot expected =
      Reference(job, Snapshot::Of(*job.state), options.steps);
  const Outcome outcome = RunJob(job);
  ASSERT_THAT(outcome.results, SizeIs(options.steps));
  EXPECT_EQ(outcome.results[0].clip_coefficient, 1);
  EXPECT_TRUE(Snapshot::Of(*job.state) == expected);
}

TEST(EngineTest, TimesThatNeverComeHoldUpNothingButTheLastResult) {
  JobOptions options;
  options.ranks = 2;
  Job job(options);
  std::vector<StepResult> results;
  auto engine = UpdateEngine::Start(
      *job.state, job.config,
      [&](const StepResult& result) { results.push_back(result); },
      [](const absl::Status& status) { ADD_FAILURE() << status; });
  Deviations silent;
  silent.rank_without_times = 1;
  FakeRanks ranks(job, silent);
  ASSERT_TRUE(ranks.Join());
  while (engine->steps_done() < options.steps) std::this_thread::yield();
  engine->Stop();
  ASSERT_THAT(results, SizeIs(options.steps));
  for (const StepResult& result : results) {
    EXPECT_EQ(result.drain_ns, 1000) << result.step;  // rank 0's
  }
}

TEST(EngineTest, AfterStopPlanesAndWordsNoLongerChange) {
  for (policy::UpdateMode mode :
       {policy::UpdateMode::kEager, policy::UpdateMode::kDeferred}) {
    JobOptions options;
    options.ranks = 2;
    options.route = policy::GradRoute::kCpu;
    options.chunk_bytes = 128;
    options.mode = mode;
    Job job(options);
    // Stop as soon as step 2 is under way.
    std::atomic<bool> reached = false, go_on = false;
    Deviations watch;
    watch.before_chunk = [&](int, uint64_t step, uint64_t chunk) {
      if (step == 2 && chunk == 3) reached = true;
      while (step > 2 && !go_on) std::this_thread::yield();
      return true;
    };
    std::atomic<int> results = 0, failures = 0;
    auto engine = UpdateEngine::Start(
        *job.state, job.config, [&](const StepResult&) { ++results; },
        [&](const absl::Status&) { ++failures; });
    FakeRanks ranks(job, watch);
    while (!reached) std::this_thread::yield();
    engine->Stop();
    go_on = true;
    const int seen = results;
    EXPECT_EQ(seen, static_cast<int>(engine->steps_done()));
    const Snapshot stopped = Snapshot::Of(*job.state);
    const uint64_t version = job.state->versions().param_version(0).load();
    engine->Stop();  // once more does nothing
    engine.reset();
    ranks.Abandon();
    EXPECT_FALSE(ranks.Join());
    EXPECT_TRUE(Snapshot::Of(*job.state) == stopped);
    EXPECT_EQ(job.state->versions().param_version(0).load(), version);
    EXPECT_EQ(results, seen);
    EXPECT_EQ(failures, 0);
  }
}

TEST(EngineTest, StopBeforeAnyRankCameEndsAtOnce) {
  Job job(JobOptions{});
  int calls = 0;
  auto engine = UpdateEngine::Start(
      *job.state, job.config, [&](const StepResult&) { ++calls; },
      [&](const absl::Status&) { ++calls; });
  engine->Stop();
  EXPECT_EQ(engine->steps_done(), 0u);
  EXPECT_EQ(calls, 0);
}

}  // namespace
}  // namespace slidedp::hostd
