// Speculative updates, and rows updated before their gradients: what is done
// early ends as if it had been done late.
#include <unistd.h>

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
#include "tests/unit/hostd_update/fake_ranks.h"

namespace slidedp::hostd {
namespace {

using policy::GradRoute;
using policy::UpdateMode;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr GradRoute kRoutes[] = {GradRoute::kGpuRoot, GradRoute::kGpuSharded,
                                 GradRoute::kCpu};

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

// What lies at an address of a segment now, while others write: read through
// the descriptor, as the thread sanitizer must not take it for a race.
template <typename T>
T ReadShared(const HostState& state, const T* address) {
  const auto* at = reinterpret_cast<const char*>(address);
  for (const shm::Segment& segment : state.segments()) {
    const char* begin = segment.mapping().at<char>(0);
    if (at < begin || at >= begin + segment.bytes()) continue;
    T value;
    EXPECT_EQ(pread(segment.fd(), &value, sizeof(T), at - begin),
              static_cast<ssize_t>(sizeof(T)));
    return value;
  }
  ADD_FAILURE() << "in no segment";
  return T();
}

double Weight(const Snapshot& s, size_t i) {
  return JoinFloat(s.hi[i], s.lo[i]);
}

// |a - b| / |b| over all weights, first and second moments; the largest.
double RelativeDistance(const Snapshot& a, const Snapshot& b) {
  double distance[3] = {}, size[3] = {};
  for (size_t i = 0; i < a.hi.size(); ++i) {
    const double of_a[] = {Weight(a, i), std::bit_cast<float>(a.m[i]),
                           std::bit_cast<float>(a.v[i])};
    const double of_b[] = {Weight(b, i), std::bit_cast<float>(b.m[i]),
                           std::bit_cast<float>(b.v[i])};
    for (int k = 0; k < 3; ++k) {
      distance[k] += (of_a[k] - of_b[k]) * (of_a[k] - of_b[k]);
      size[k] += of_b[k] * of_b[k];
    }
  }
  double worst = 0;
  for (int k = 0; k < 3; ++k) {
    worst = std::max(worst, std::sqrt(distance[k] / size[k]));
  }
  return worst;
}

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
