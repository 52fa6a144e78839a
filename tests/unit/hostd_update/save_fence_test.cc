// What is saved while the engine goes on is one version, in every mode; and a
// job that goes on from it ends in the same bits.
#include "hostd/update/save_fence.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <random>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/backoff.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hostd/update/engine.h"
#include "tests/unit/hostd_update/fake_ranks.h"

namespace slidedp::hostd {
namespace {

using policy::GradRoute;
using policy::UpdateMode;
using ::testing::Combine;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::Values;

TEST(SaveFenceTest, TasksOfHeldUnitsWaitForTheirOwnRelease) {
  std::vector<int> pushed;
  SaveFence fence({1, 1, 1},
                  [&](const Task& task) { pushed.push_back(task.unit); });
  const auto pass = [&](int unit) { fence.Pass({unit, TaskKind::kUpdate, 0}); };
  pass(0);
  EXPECT_THAT(pushed, ElementsAre(0));
  fence.Hold();
  pass(2), pass(1), pass(1);
  EXPECT_THAT(pushed, ElementsAre(0));
  fence.Release(1);
  EXPECT_THAT(pushed, ElementsAre(0, 1, 1));
  fence.Release(1);
  pass(1);
  EXPECT_THAT(pushed, ElementsAre(0, 1, 1, 1));
  // A decision drops what it makes anew.
  fence.Drop([] {});
  fence.Release(2);
  EXPECT_THAT(pushed, ElementsAre(0, 1, 1, 1));
}

TEST(SaveFenceTest, UnitsThatNeverChangeAreNotHeld) {
  SaveFence fence({1, 0}, [](const Task&) {});
  EXPECT_FALSE(fence.holds_any());
  fence.Hold();
  EXPECT_TRUE(fence.holds_any());
  fence.Release(0);
  EXPECT_FALSE(fence.holds_any());
}

// Norm of the head's gradient in a step that is clipped: half of the norm at
// which some units are updated early and corrected.
double ClippingNorm(const Job& job) {
  double head_norm = 0;
  for (bf16 g : job.script[0].gradients[0].back()) {
    head_norm += std::pow(Bf16ToFloat(g), 2);
  }
  return 2 * std::sqrt(head_norm);
}

class SavingTest
    : public ::testing::TestWithParam<std::tuple<UpdateMode, GradRoute>> {
 protected:
  static constexpr uint64_t kSteps = 12;
  Job MakeJob() const {
    JobOptions options;
    std::tie(options.mode, options.route) = GetParam();
    options.ranks = 2;
    options.steps = kSteps;
    options.threads = 2;
    options.used_rows_percent = 40;
    Job job(options);
    // Every other step is clipped; one has no tokens, one is not finite.
    if (options.mode != UpdateMode::kEager) {
      job.config.max_grad_norm = ClippingNorm(job);
      job.config.clipped_to_defer = 6;
      job.script[4].loss_sums[1] = std::nan("");
    }
    job.script[7].valid_tokens = 0;
    return job;
  }
};

// Every boundary is saved, slowly and in some order, while the ranks go on.
TEST_P(SavingTest, EveryUnitIsSavedAsItWasAtTheBoundary) {
  Job plain = MakeJob();
  EXPECT_THAT(RunJob(plain).failures, IsEmpty());

  Job job = MakeJob();
  const model::StateLayout& layout = job.state->layout();
  std::mt19937 random(3);
  std::thread saver;
  uint64_t saved = 0;
  std::atomic<uint64_t> wrong = 0;
  std::atomic<bool> over = false;
  const auto save = [&](UpdateEngine& engine, uint64_t step,
                        const Snapshot& version, std::vector<int> order) {
    // As long as possible: the rank has gradients for what is held.
    const uint64_t chunks = job.state->grad_schedule().chunks[0].size();
    Backoff backoff;
    while (step < kSteps && !over &&
           job.state->reports().grad_ready(0).load() <= step * chunks) {
      backoff.Pause();
    }
    for (int unit : order) {
      uint64_t at = 0;
      for (int u = 0; u < unit; ++u) at += layout.units[u].count;
      const PlaneSpan p = job.state->planes(unit, 0, layout.units[unit].count);
      for (uint64_t i = 0; i < p.count; ++i) {
        wrong += p.hi[i] != version.hi[at + i] ||
                 p.lo[i] != version.lo[at + i] ||
                 std::bit_cast<uint32_t>(p.m[i]) != version.m[at + i] ||
                 std::bit_cast<uint32_t>(p.v[i]) != version.v[at + i];
      }
      engine.Release(unit);
    }
  };
  const Outcome outcome =
      RunJob(job, {}, [&](UpdateEngine& engine, const Boundary& boundary) {
        if (saver.joinable()) saver.join();
        std::vector<int> order(layout.units.size());
        for (size_t u = 0; u < order.size(); ++u)
          order[u] = static_cast<int>(u);
        std::shuffle(order.begin(), order.end(), random);
        ++saved;
        saver = std::thread(save, std::ref(engine), boundary.step,
                            Snapshot::Of(*job.state), order);
        // Release() ends before the engine does.
        if (boundary.step == kSteps) saver.join();
        return true;
      });
  over = true;
  if (saver.joinable()) saver.join();
  EXPECT_THAT(outcome.failures, IsEmpty());
  EXPECT_THAT(outcome.results, SizeIs(kSteps));
  EXPECT_EQ(saved, kSteps);
  EXPECT_EQ(wrong, 0u);
  EXPECT_TRUE(Snapshot::Of(*job.state) == Snapshot::Of(*plain.state));
}

TEST_P(SavingTest, AJobThatGoesOnEndsInTheSameBits) {
  Job whole = MakeJob();
  std::vector<Snapshot> states;
  std::vector<Boundary> boundaries;
  const Outcome uninterrupted =
      RunJob(whole, {}, [&](UpdateEngine&, const Boundary& boundary) {
        states.push_back(Snapshot::Of(*whole.state));
        boundaries.push_back(boundary);
        return false;
      });
  EXPECT_THAT(uninterrupted.failures, IsEmpty());
  ASSERT_THAT(boundaries, SizeIs(kSteps));
  for (size_t i = 0; i < kSteps; ++i) {
    SCOPED_TRACE(absl::StrCat("after step ", i));
    EXPECT_EQ(boundaries[i].step, i + 1);
    Job rest = MakeJob();
    states[i].CopyTo(*rest.state);
    rest.config.first_step = boundaries[i].step;
    rest.config.updates_applied = boundaries[i].updates_applied;
    rest.config.clip_history = boundaries[i].clip_history;
    const Outcome outcome = RunJob(rest);
    EXPECT_THAT(outcome.failures, IsEmpty());
    ASSERT_THAT(outcome.results, SizeIs(kSteps - i - 1));
    EXPECT_EQ(outcome.steps_done, kSteps);
    EXPECT_TRUE(Snapshot::Of(*rest.state) == Snapshot::Of(*whole.state));
    for (size_t k = 0; k < outcome.results.size(); ++k) {
      const StepResult& again = outcome.results[k];
      const StepResult& before = uninterrupted.results[i + 1 + k];
      EXPECT_EQ(again.step, before.step);
      EXPECT_EQ(again.speculated, before.speculated);
      EXPECT_EQ(again.clip_coefficient, before.clip_coefficient);
      EXPECT_EQ(again.lr, before.lr);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, SavingTest,
    Combine(Values(UpdateMode::kEager, UpdateMode::kDeferred,
                   UpdateMode::kSpeculative),
            Values(GradRoute::kGpuRoot, GradRoute::kGpuSharded,
                   GradRoute::kCpu)),
    [](const auto& info) {
      return absl::StrCat(policy::Name(std::get<0>(info.param)), "_",
                          policy::Name(std::get<1>(info.param)));
    });

TEST(SavingStopTest, AnEngineStopsWithUnitsHeld) {
  JobOptions options;
  options.steps = 50;
  Job job(options);
  std::atomic<uint64_t> reached = 0;
  auto engine = UpdateEngine::Start(
      *job.state, job.config, [](const StepResult&) {},
      [](const absl::Status& status) { ADD_FAILURE() << status; },
      [&](const Boundary& boundary) {
        reached = boundary.step;
        return boundary.step == 3;
      });
  FakeRanks ranks(job);
  Backoff backoff;
  while (reached < 3) backoff.Pause();
  const Snapshot held = Snapshot::Of(*job.state);
  engine->Stop();
  EXPECT_TRUE(Snapshot::Of(*job.state) == held);
  EXPECT_EQ(engine->steps_done(), 3u);
}

}  // namespace
}  // namespace slidedp::hostd
