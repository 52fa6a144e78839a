// Rows of the embedding table that no batch uses, updated before the gradients
// come: the end is as if they had been updated late.
#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/backoff.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
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

class RowsTest : public ::testing::TestWithParam<UpdateMode> {
 protected:
  JobOptions Options(GradRoute route, int percent) {
    JobOptions options;
    options.mode = GetParam();
    options.route = route;
    options.ranks = 2;
    options.used_rows_percent = percent;
    options.steps = 5;
    options.ring_chunks = 4;
    // As the default clips half of the steps, which speculation ends to
    // rounding only.
    if (options.mode == UpdateMode::kSpeculative) options.max_grad_norm = 1e6;
    return options;
  }
};

TEST_P(RowsTest, EarlyRowsChangeNoBit) {
  for (GradRoute route : kRoutes) {
    for (int percent : {0, 30, 95}) {
      // Chunks and slices of less than a row, of odd parts of rows, of many.
      for (uint64_t chunk_bytes : {128u, 896u, 1u << 20}) {
        for (uint64_t slice_elements : {64u, 1000u}) {
          JobOptions options = Options(route, percent);
          options.chunk_bytes = chunk_bytes;
          options.slice_elements = slice_elements;
          SCOPED_TRACE(absl::StrCat(policy::Name(route), " ", percent, " % ",
                                    chunk_bytes, " ", slice_elements));
          Job job(options);
          const Snapshot start = Snapshot::Of(*job.state);
          for (uint64_t s = 0; s < options.steps; ++s) {
            job.versions.push_back(Reference(job, start, s).hi);
          }
          const Outcome outcome = RunJob(job);
          EXPECT_THAT(outcome.failures, IsEmpty());
          EXPECT_EQ(outcome.torn_elements, 0u);
          EXPECT_TRUE(Snapshot::Of(*job.state) ==
                      Reference(job, start, options.steps));
        }
      }
    }
  }
}

// Nothing may be done that a skipped step would have to undo: rows wait for the
// decision, and are updated all the same.
TEST_P(RowsTest, RowsThatCannotBeUndoneChangeNoBit) {
  for (GradRoute route : kRoutes) {
    for (int percent : {0, 30}) {
      SCOPED_TRACE(absl::StrCat(policy::Name(route), " ", percent, " %"));
      Job job(Options(route, percent));
      job.config.beta1 = 0.25;
      if (GetParam() != UpdateMode::kEager) job.config.max_grad_norm = 0.5;
      if (GetParam() != UpdateMode::kEager) {
        job.script[2].gradients[0][2][7] = 0x7fc0;
      }
      const Snapshot start = Snapshot::Of(*job.state);
      const Outcome outcome = RunJob(job);
      EXPECT_THAT(outcome.failures, IsEmpty());
      ASSERT_THAT(outcome.results, SizeIs(job.options.steps));
      EXPECT_EQ(outcome.results[2].skipped, GetParam() != UpdateMode::kEager);
      EXPECT_TRUE(Snapshot::Of(*job.state) ==
                  Reference(job, start, job.options.steps));
    }
  }
}

// Elements of the table that no batch of the step uses.
std::vector<uint64_t> OtherElements(const Job& job, uint64_t step) {
  const model::Tensor& table =
      job.state->layout().units[0].tensor(model::Role::kEmbedding);
  const uint64_t rows = table.shape[0], width = table.count / rows;
  std::vector<uint64_t> elements;
  for (uint64_t row = 0; row < rows; ++row) {
    bool used = false;
    for (const auto& words : job.script[step].used_rows) {
      used |= (words[row / 64] >> (row % 64)) & 1;
    }
    for (uint64_t i = 0; i < width && !used; ++i) {
      elements.push_back(table.offset + row * width + i);
    }
  }
  return elements;
}

TEST_P(RowsTest, OtherRowsAreUpdatedBeforeTheFirstGradientComes) {
  JobOptions options = Options(GradRoute::kGpuSharded, 50);
  options.steps = 2;
  Job job(options);
  const Snapshot start = Snapshot::Of(*job.state);
  const Snapshot expected = Reference(job, start, 1);
  const std::vector<uint64_t> others = OtherElements(job, 0);
  ASSERT_FALSE(others.empty());
  const PlaneSpan planes =
      job.state->planes(0, 0, job.state->layout().units[0].count);
  // Weight decay moves them in step 0: the moments are still 0.
  const auto updated = [&] {
    return std::all_of(others.begin(), others.end(), [&](uint64_t i) {
      return ReadShared(*job.state, planes.hi + i) == expected.hi[i] &&
             ReadShared(*job.state, planes.lo + i) == expected.lo[i];
    });
  };
  std::atomic<int> seen = 0;
  Deviations watch;
  watch.before_chunk = [&](int, uint64_t step, uint64_t chunk) {
    if (step != 0 || chunk != 0) return true;
    Backoff backoff;
    while (!updated()) backoff.Pause();
    ++seen;
    return true;
  };
  const Outcome outcome = RunJob(job, watch);
  EXPECT_THAT(outcome.failures, IsEmpty());
  EXPECT_EQ(seen, 2);
  EXPECT_TRUE(Snapshot::Of(*job.state) == Reference(job, start, 2));
}

TEST_P(RowsTest, NoRowIsTouchedWhileARankMayReadTheTable) {
  JobOptions options = Options(GradRoute::kGpuSharded, 50);
  options.steps = 1;
  Job job(options);
  const Snapshot start = Snapshot::Of(*job.state);
  std::atomic<bool> held = false;
  Deviations hold;
  // Rank 1 never says that it has read the table.
  hold.before_embedded = [&](int rank, uint64_t) {
    held = held || rank == 1;
    return rank != 1;
  };
  std::atomic<int> calls = 0;
  auto engine = UpdateEngine::Start(
      *job.state, job.config, [&](const StepResult&) { ++calls; },
      [&](const absl::Status&) { ++calls; });
  FakeRanks ranks(job, hold);
  while (!held ||
         job.state->reports().step(0, 0).loss_ready.value.load() == 0) {
    std::this_thread::yield();
  }
  engine->Stop();
  ranks.Abandon();
  ranks.Join();
  EXPECT_EQ(calls, 0);
  EXPECT_TRUE(Snapshot::Of(*job.state) == start);
}

TEST_P(RowsTest, RowsThatAreNotThereNameTheRank) {
  Job job(Options(GradRoute::kGpuSharded, 50));
  const Snapshot start = Snapshot::Of(*job.state);
  const uint64_t rows = policy::ReportedRows(job.state->layout());
  Deviations lie;
  lie.before_begun = [&](int rank, uint64_t step) {
    if (rank == 1) {
      job.state->reports().used_rows(1, step)[rows / 64] |= uint64_t{1}
                                                            << (rows % 64 + 2);
    }
    return true;
  };
  const Outcome outcome = RunJob(job, lie);
  ASSERT_THAT(outcome.failures, SizeIs(1));
  EXPECT_THAT(std::string(outcome.failures[0].message()),
              AllOf(HasSubstr("rank 1"), HasSubstr("used_rows"),
                    HasSubstr(absl::StrCat("row ", rows + 2, " of ", rows))));
  EXPECT_TRUE(Snapshot::Of(*job.state) == start);
}

TEST_P(RowsTest, LossBeforeTheTableWasReadIsAFailure) {
  Job job(Options(GradRoute::kGpuRoot, 50));
  Deviations lie;
  lie.before_embedded = [&](int rank, uint64_t step) {
    if (rank != 1) return true;
    job.state->reports().step(1, step).loss_ready.value.store(step + 1);
    return false;
  };
  const Outcome outcome = RunJob(job, lie);
  ASSERT_THAT(outcome.failures, SizeIs(1));
  EXPECT_THAT(std::string(outcome.failures[0].message()),
              HasSubstr("embedded"));
}

INSTANTIATE_TEST_SUITE_P(All, RowsTest,
                         ::testing::Values(UpdateMode::kEager,
                                           UpdateMode::kDeferred,
                                           UpdateMode::kSpeculative),
                         [](const ::testing::TestParamInfo<UpdateMode>& info) {
                           return absl::StrCat(policy::Name(info.param));
                         });

TEST(RowsSkippedTest, OtherRowsOfASkippedStepGoBackToRounding) {
  JobOptions options;
  options.ranks = 2;
  options.used_rows_percent = 40;
  options.steps = 5;
  Job job(options);
  job.script[2].gradients[0][2][7] = 0x7fc0;
  const Snapshot expected =
      Reference(job, Snapshot::Of(*job.state), options.steps);
  const Outcome outcome = RunJob(job);
  ASSERT_THAT(outcome.results, SizeIs(options.steps));
  EXPECT_TRUE(outcome.results[2].skipped);
  const Snapshot found = Snapshot::Of(*job.state);
  EXPECT_LE(RelativeDistance(found, expected), 5e-7);
  // Only those rows: the others were not touched in that step.
  std::vector<char> undone(found.hi.size());
  for (uint64_t i : OtherElements(job, 2)) undone[i] = true;
  for (size_t i = 0; i < found.hi.size(); ++i) {
    if (undone[i]) continue;
    ASSERT_EQ(found.lo[i], expected.lo[i]) << i;
    ASSERT_EQ(found.m[i], expected.m[i]) << i;
  }
}

}  // namespace
}  // namespace slidedp::hostd
