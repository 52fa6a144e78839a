// Who drains what, and where it lies.
#include <map>

#include "common/base/units.h"
#include "gtest/gtest.h"
#include "policy/plan.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/policy/problems.h"

namespace slidedp::policy {
namespace {

struct Case {
  int ranks;
  GradRoute route;
  uint64_t chunk_bytes;
  bool tied;
};

class GradScheduleTest : public ::testing::TestWithParam<Case> {};

// Every element of every unit is drained by exactly the ranks that its route
// names, in backward order of units and buckets, in chunks that fit a slot.
TEST_P(GradScheduleTest, CoversEveryUnitOnce) {
  const Case& c = GetParam();
  Problem problem = TinyProblem(c.ranks, c.tied);
  problem.grads = c.route;
  problem.d2h_chunk_bytes = c.chunk_bytes;
  ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(problem));
  const model::StateLayout layout = model::MakeStateLayout(problem.config);
  const GradSchedule schedule = MakeGradSchedule(layout, plan);
  ASSERT_EQ(schedule.chunks.size(), static_cast<size_t>(c.ranks));
  std::vector<std::vector<int>> drained;
  for (const model::Unit& unit : layout.units) {
    drained.emplace_back(unit.count, 0);
  }
  for (int r = 0; r < c.ranks; ++r) {
    int bucket = -1;
    uint64_t next = 0;
    for (const GradChunk& chunk : schedule.chunks[r]) {
      ASSERT_GE(chunk.bucket, bucket);
      if (chunk.bucket == bucket) {
        EXPECT_EQ(chunk.begin, next);
      }
      bucket = chunk.bucket;
      const int unit = chunk.unit;
      ASSERT_EQ(schedule.buckets[bucket].unit, unit);
      next = chunk.begin + chunk.count;
      ASSERT_GT(chunk.count, 0u);
      ASSERT_LE(chunk.count, schedule.chunk_elements);
      ASSERT_GE(chunk.begin, schedule.buckets[bucket].begin);
      ASSERT_LE(next, schedule.buckets[bucket].end);
      for (uint64_t i = chunk.begin; i < next; ++i) ++drained[unit][i];
    }
  }
  const int times = c.route == GradRoute::kCpu ? c.ranks : 1;
  for (size_t u = 0; u < drained.size(); ++u) {
    for (size_t i = 0; i < drained[u].size(); ++i) {
      ASSERT_EQ(drained[u][i], times) << "unit " << u << " element " << i;
    }
  }
}

// Units from the last to the first, each from its end to its start; cut where
// a backward pass has finished what lies behind, so that shards are equal.
TEST_P(GradScheduleTest, BucketsFollowTheBackwardPass) {
  const Case& c = GetParam();
  Problem problem = TinyProblem(c.ranks, c.tied);
  problem.grads = c.route;
  ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(problem));
  const model::StateLayout layout = model::MakeStateLayout(problem.config);
  const std::vector<GradBucket> buckets = MakeGradBuckets(layout, plan);
  const bool whole = c.route == GradRoute::kCpu && c.ranks > 1;
  size_t next = 0;
  for (int u = static_cast<int>(layout.units.size()) - 1; u >= 0; --u) {
    const model::Unit& unit = layout.units[u];
    uint64_t end = unit.count;
    std::vector<uint64_t> cuts = {0};
    if (unit.kind == model::UnitKind::kDecoder && !whole) {
      for (model::Role role :
           {model::Role::kO, model::Role::kPostNorm, model::Role::kDown}) {
        cuts.push_back(
            AlignUp(unit.tensor(role).offset, kShardAlignment * plan.ranks));
      }
    }
    for (; !cuts.empty(); cuts.pop_back()) {
      if (cuts.back() >= end) continue;
      ASSERT_LT(next, buckets.size());
      const GradBucket& bucket = buckets[next++];
      EXPECT_EQ(bucket.unit, u);
      EXPECT_EQ(bucket.begin, cuts.back());
      EXPECT_EQ(bucket.end, end);
      if (end != unit.count) {
        EXPECT_EQ(ShardElements(end - bucket.begin, plan.ranks) * plan.ranks,
                  end - bucket.begin);
      }
      uint64_t covered = bucket.begin;
      for (int r = 0; r < plan.ranks; ++r) {
        const GradShard shard = ShardOf(bucket, r, plan.ranks);
        EXPECT_EQ(shard.begin, covered);
        covered = shard.end;
      }
      EXPECT_EQ(covered, end);
      end = bucket.begin;
    }
  }
  EXPECT_EQ(next, buckets.size());
}

// A slot holds every chunk that comes to lie in it, and nothing else lies
// there.
TEST_P(GradScheduleTest, SlotsDoNotOverlap) {
  const Case& c = GetParam();
  for (bool clipping : {true, false}) {
    Problem problem = TinyProblem(c.ranks, c.tied);
    problem.grads = c.route;
    problem.d2h_chunk_bytes = c.chunk_bytes;
    problem.clipping = clipping;
    problem.own_chunks = 2;
    problem.ring_chunks = 3;
    ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(problem));
    const GradSchedule schedule =
        MakeGradSchedule(model::MakeStateLayout(problem.config), plan);
    uint64_t end = 0, used = 0;
    for (int r = 0; r < c.ranks; ++r) {
      const std::vector<GradChunk>& chunks = schedule.chunks[r];
      if (clipping) {
        EXPECT_EQ(schedule.own[r], chunks.size());
        EXPECT_EQ(schedule.ring[r], 0u);
      } else {
        EXPECT_LE(schedule.own[r], 2u);
        EXPECT_LE(schedule.ring[r], 3u);
      }
      std::map<uint64_t, uint64_t> most;  // bytes, by offset
      for (uint64_t n = 0; n < chunks.size(); ++n) {
        const uint64_t at = schedule.slot_offset_bytes(r, n);
        EXPECT_EQ(schedule.slot_offset_bytes(r, n + 3 * chunks.size()), at);
        // Whoever was there before is one of those that had to be free.
        const bool taken = most.contains(at);
        EXPECT_EQ(taken, n >= schedule.slots(r));
        EXPECT_EQ(taken, schedule.FreeBefore(r, n + 1) > 0);
        if (taken) {
          const uint64_t before = schedule.FreeBefore(r, n + 1) - 1;
          EXPECT_EQ(schedule.slot_offset_bytes(r, before), at);
          EXPECT_EQ(schedule.WrittenAtMost(r, before + 1), n + 1);
        }
        most[at] = std::max(most[at], 2 * chunks[n].count);
      }
      EXPECT_EQ(most.size(), schedule.slots(r));
      for (const auto& [begin, bytes] : most) {
        EXPECT_GE(begin, end);
        EXPECT_EQ(begin % kCacheLineBytes, 0u);
        end = begin + bytes;
        used += AlignUp(bytes, kCacheLineBytes);
      }
    }
    EXPECT_LE(end, schedule.grads_bytes);
    if (clipping) {
      EXPECT_LE(schedule.grads_bytes, used + c.ranks * kPageBytes);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Routes, GradScheduleTest,
    ::testing::Values(Case{1, GradRoute::kGpuRoot, 0, false},
                      Case{1, GradRoute::kGpuSharded, 1024, true},
                      Case{2, GradRoute::kGpuRoot, 4096, false},
                      Case{2, GradRoute::kGpuSharded, 4096, true},
                      Case{3, GradRoute::kGpuSharded, 640, false},
                      Case{3, GradRoute::kCpu, 1280, true},
                      Case{7, GradRoute::kGpuSharded, 128, false}));

TEST(ShardElementsTest, ShardsCoverTheUnit) {
  for (uint64_t count : {1, 63, 64, 65, 128, 1000, 4096, 100003}) {
    for (int ranks = 1; ranks <= 9; ++ranks) {
      const uint64_t shard = ShardElements(count, ranks);
      EXPECT_EQ(shard % 64, 0u);
      EXPECT_GE(shard * ranks, count);
      EXPECT_LT(shard, count / ranks + 65);
    }
  }
}

}  // namespace
}  // namespace slidedp::policy
