// The update engine against ranks that break the rules: one failure that names
// the rank or unit, and planes that stay as they were.
#include <atomic>
#include <cmath>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hostd/update/engine.h"
#include "tests/unit/hostd_update/fake_ranks.h"

namespace slidedp::hostd {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

std::string OnlyFailure(const Outcome& outcome) {
  EXPECT_THAT(outcome.failures, SizeIs(1));
  return outcome.failures.empty() ? ""
                                  : std::string(outcome.failures[0].message());
}

// Units that the run did not touch at all since `start`.
bool UnitUnchanged(const Job& job, const Snapshot& start, int unit) {
  const Snapshot now = Snapshot::Of(*job.state);
  uint64_t begin = 0;
  for (int u = 0; u < unit; ++u) begin += job.state->layout().units[u].count;
  const uint64_t end = begin + job.state->layout().units[unit].count;
  for (uint64_t i = begin; i < end; ++i) {
    if (now.hi[i] != start.hi[i] || now.lo[i] != start.lo[i] ||
        now.m[i] != start.m[i] || now.v[i] != start.v[i]) {
      return false;
    }
  }
  return true;
}

// Whether the chunk is the first of a bucket of the unit; then also which.
bool BeginsBucket(const Job& job, int rank, uint64_t chunk, int unit,
                  int* bucket) {
  const auto& chunks = job.state->grad_schedule().chunks[rank];
  *bucket = chunks[chunk].bucket;
  return chunks[chunk].unit == unit &&
         (chunk == 0 || chunks[chunk - 1].bucket != *bucket);
}

JobOptions Eager(policy::GradRoute route) {
  JobOptions options;
  options.ranks = 2;
  options.mode = policy::UpdateMode::kEager;
  options.route = route;
  options.chunk_bytes = 256;
  return options;
}

TEST(EngineHostileTest, EagerNonFiniteUnitStopsBeforeItsPlanesAreTouched) {
  for (policy::GradRoute route :
       {policy::GradRoute::kGpuRoot, policy::GradRoute::kGpuSharded,
        policy::GradRoute::kCpu}) {
    Job job(Eager(route));
    // The last element: its chunk comes last, the unit must wait for no NaN.
    const int rank = route == policy::GradRoute::kGpuRoot ? 0 : 1;
    std::vector<bf16>& unit =
        job.script[0].gradients[route == policy::GradRoute::kCpu ? 1 : 0][1];
    const model::Tensor& last = job.state->layout().units[1].tensors.back();
    unit[last.offset + last.count - 1] = 0x7fc0;
    const Snapshot start = Snapshot::Of(*job.state);
    const Outcome outcome = RunJob(job);
    EXPECT_THAT(OnlyFailure(outcome),
                AllOf(HasSubstr("unit 1 (decoder layer 0)"),
                      HasSubstr(rank == 0 ? "rank 0" : "rank 1"),
                      HasSubstr("step 0"), HasSubstr("max_grad_norm")));
    EXPECT_THAT(outcome.results, IsEmpty());
    EXPECT_TRUE(UnitUnchanged(job, start, 1));
    EXPECT_TRUE(UnitUnchanged(job, start, 0));
    EXPECT_EQ(job.state->versions().param_version(1).load(), 0u);
  }
}

TEST(EngineHostileTest, EagerNonFiniteLossStopsBeforeAnyPlaneIsTouched) {
  Job job(Eager(policy::GradRoute::kGpuRoot));
  job.script[0].loss_sums[1] = std::numeric_limits<double>::infinity();
  const Snapshot start = Snapshot::Of(*job.state);
  const Outcome outcome = RunJob(job);
  EXPECT_THAT(OnlyFailure(outcome),
              AllOf(HasSubstr("rank 1"), HasSubstr("loss is not finite")));
  EXPECT_TRUE(Snapshot::Of(*job.state) == start);
}

TEST(EngineHostileTest, EagerRefusesNanThatTheNormDidNotShow) {
  Job job(Eager(policy::GradRoute::kGpuSharded));
  Deviations lie;
  lie.before_chunk = [&](int rank, uint64_t step, uint64_t chunk) {
    const policy::GradChunk& c = job.state->grad_schedule().chunks[rank][chunk];
    if (rank != 1 || step != 0 || c.unit != 2) return true;
    const uint64_t number = chunk;
    bf16* values = const_cast<bf16*>(job.state->grad_chunk(rank, number));
    for (uint64_t i = 0; i < c.count; ++i) values[i] = 0x7fc0;
    return true;
  };
  const Outcome outcome = RunJob(job, lie);
  EXPECT_THAT(OnlyFailure(outcome),
              AllOf(HasSubstr("unit 2"), HasSubstr("finite range")));
  const Snapshot now = Snapshot::Of(*job.state);
  for (uint32_t m : now.m) ASSERT_NE(m & 0x7f800000u, 0x7f800000u);
}

TEST(EngineHostileTest, NormsThatAreNoSquareNormsSkipADeferredStep) {
  for (double value : {std::nan(""), -1.0, -0x1p300,
                       std::numeric_limits<double>::infinity()}) {
    for (policy::GradRoute route :
         {policy::GradRoute::kGpuSharded, policy::GradRoute::kCpu}) {
      JobOptions options;
      options.ranks = 2;
      options.route = route;
      options.steps = 1;
      Job job(options);
      const Snapshot start = Snapshot::Of(*job.state);
      Deviations lie;
      lie.before_chunk = [&](int rank, uint64_t, uint64_t chunk) {
        int bucket = 0;
        if (rank == 1 && BeginsBucket(job, rank, chunk, 1, &bucket)) {
          job.state->reports().square_norm(1, bucket) = value;
        }
        return true;
      };
      const Outcome outcome = RunJob(job, lie);
      EXPECT_THAT(outcome.failures, IsEmpty());
      ASSERT_THAT(outcome.results, SizeIs(1));
      EXPECT_TRUE(outcome.results[0].skipped) << value;
      EXPECT_THAT(outcome.results[0].skip_reason, HasSubstr("unit 1"));
      EXPECT_TRUE(Snapshot::Of(*job.state) == start);
    }
  }
}

TEST(EngineHostileTest, GradReadyBeyondTheRingNamesTheRank) {
  for (policy::UpdateMode mode :
       {policy::UpdateMode::kEager, policy::UpdateMode::kDeferred}) {
    JobOptions options = Eager(policy::GradRoute::kGpuSharded);
    options.mode = mode;
    Job job(options);
    const uint64_t slots = job.state->grad_schedule().slots(1);
    for (uint64_t jump : {slots + 1, ~uint64_t{0}}) {
      Job hostile(options);
      const Snapshot start = Snapshot::Of(*hostile.state);
      Deviations lie;
      lie.before_begun = [&](int rank, uint64_t) {
        if (rank == 1) hostile.state->reports().grad_ready(1).store(jump);
        return true;
      };
      // Its proper announcements must not hide the jump.
      lie.before_chunk = [](int rank, uint64_t, uint64_t) { return rank != 1; };
      const Outcome outcome = RunJob(hostile, lie);
      EXPECT_THAT(OnlyFailure(outcome),
                  AllOf(HasSubstr("rank 1"), HasSubstr("grad_ready")));
      EXPECT_THAT(outcome.results, IsEmpty());
      EXPECT_TRUE(Snapshot::Of(*hostile.state) == start);
    }
  }
}

TEST(EngineHostileTest, RankThatDrainsNothingMayAnnounceNothing) {
  Job job(Eager(policy::GradRoute::kGpuRoot));
  Deviations lie;
  lie.before_times = [&](int rank, uint64_t) {
    if (rank == 1) job.state->reports().grad_ready(1).store(1);
    return rank != 1;
  };
  EXPECT_THAT(OnlyFailure(RunJob(job, lie)),
              AllOf(HasSubstr("rank 1"), HasSubstr("grad_ready = 1")));
}

TEST(EngineHostileTest, GradReadyThatGoesBackNamesTheRank) {
  Job job(Eager(policy::GradRoute::kGpuSharded));
  Deviations lie;
  lie.before_chunk = [&](int rank, uint64_t, uint64_t chunk) {
    if (rank != 1 || chunk < 3) return true;
    // What was consumed was seen.
    while (job.state->versions().grad_free(1).load() < 1) {
      std::this_thread::yield();
    }
    job.state->reports().grad_ready(1).store(0);
    return false;
  };
  EXPECT_THAT(OnlyFailure(RunJob(job, lie)),
              AllOf(HasSubstr("rank 1"), HasSubstr("grad_ready = 0")));
}

TEST(EngineHostileTest, ChunkOfAStepWhoseParametersAreNotPublishedIsAFailure) {
  Job job(Eager(policy::GradRoute::kGpuSharded));
  const uint64_t last = job.state->grad_schedule().chunks[1].size() - 1;
  const uint64_t all = job.state->grad_schedule().chunks[0].size();
  Deviations lie;
  // Rank 1 holds back its last chunk, so that unit 0 stays unpublished.
  lie.before_chunk = [&](int rank, uint64_t, uint64_t chunk) {
    return rank != 1 || chunk != last;
  };
  lie.before_times = [&](int, uint64_t) {
    while (job.state->versions().grad_free(0).load() < all) {
      std::this_thread::yield();
    }
    job.state->reports().grad_ready(0).store(all + 1);
    return false;
  };
  EXPECT_THAT(
      OnlyFailure(RunJob(job, lie)),
      AllOf(HasSubstr("rank 0"), HasSubstr("a chunk of step 1 before")));
}

TEST(EngineHostileTest, RanksMustAgreeOnValidTokens) {
  for (policy::UpdateMode mode :
       {policy::UpdateMode::kEager, policy::UpdateMode::kDeferred}) {
    JobOptions options = Eager(policy::GradRoute::kCpu);
    options.mode = mode;
    Job job(options);
    const Snapshot start = Snapshot::Of(*job.state);
    Deviations lie;
    lie.before_begun = [&](int rank, uint64_t step) {
      if (rank == 1) job.state->reports().step(1, step).valid_tokens = 99;
      return true;
    };
    const Outcome outcome = RunJob(job, lie);
    EXPECT_THAT(OnlyFailure(outcome),
                AllOf(HasSubstr("rank 1"), HasSubstr("valid_tokens = 99"),
                      HasSubstr("100")));
    EXPECT_TRUE(Snapshot::Of(*job.state) == start);
  }
}

TEST(EngineHostileTest, FlagsOfStepsThatCannotHaveBegunNameTheRank) {
  for (const char* field : {"begun", "loss_ready"}) {
    Job job(Eager(policy::GradRoute::kGpuSharded));
    Deviations lie;
    lie.before_begun = [&](int rank, uint64_t step) {
      if (rank != 1) return true;
      shm::StepReport& report = job.state->reports().step(1, step);
      (std::string(field) == "begun" ? report.begun : report.loss_ready)
          .value.store(step + 5);
      if (std::string(field) == "begun") return false;
      report.begun.value.store(step + 1, std::memory_order_release);
      return false;
    };
    EXPECT_THAT(OnlyFailure(RunJob(job, lie)),
                AllOf(HasSubstr("rank 1"), HasSubstr(field)));
  }
}

TEST(EngineHostileTest, NothingIsAppliedAfterAFailure) {
  Job job(Eager(policy::GradRoute::kGpuSharded));
  Deviations lie;
  lie.before_begun = [&](int rank, uint64_t step) {
    if (rank != 1 || step != 2) return true;
    job.state->reports().step(1, step).valid_tokens = 7;
    return true;
  };
  std::atomic<int> failures = 0;
  Snapshot at_failure;
  auto engine = UpdateEngine::Start(
      *job.state, job.config, [](const StepResult&) {},
      [&](const absl::Status&) {
        at_failure = Snapshot::Of(*job.state);
        ++failures;
      });
  FakeRanks ranks(job, lie);
  while (failures == 0) std::this_thread::yield();
  ranks.Abandon();
  ranks.Join();
  EXPECT_TRUE(Snapshot::Of(*job.state) == at_failure);
  EXPECT_EQ(engine->steps_done(), 2u);
  engine->Stop();
  EXPECT_TRUE(Snapshot::Of(*job.state) == at_failure);
  EXPECT_EQ(failures, 1);
}

}  // namespace
}  // namespace slidedp::hostd
