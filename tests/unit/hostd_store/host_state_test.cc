// Segments and planes of a job.
#include "hostd/store/host_state.h"

#include <dirent.h>
#include <sys/stat.h>

#include <set>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hostd/store/split.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/tiny_model.h"

namespace slidedp::hostd {
namespace {

policy::Plan TwoRanks(policy::GradRoute route, policy::UpdateMode mode) {
  policy::Plan plan;
  plan.ranks = 2;
  plan.embedding.grads = plan.decoder.grads = plan.head.grads = route;
  plan.update_mode = mode;
  plan.h2d_chunk_bytes = plan.d2h_chunk_bytes = 8192;
  plan.ring_chunks = 3;
  return plan;
}

model::StateLayout Layout() {
  return model::MakeStateLayout(testing::TinyConfig({}));
}

int OpenDescriptors() {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

TEST(HostStateTest, SegmentsAreThoseOfThePlanToTheByte) {
  const model::StateLayout layout = Layout();
  for (policy::UpdateMode mode :
       {policy::UpdateMode::kEager, policy::UpdateMode::kDeferred}) {
    const policy::Plan plan = TwoRanks(policy::GradRoute::kCpu, mode);
    ASSERT_OK_AND_ASSIGN(auto state, HostState::Create("j", layout, plan));
    const std::vector<policy::NamedBytes> expected =
        policy::HostSegments(layout, plan);
    ASSERT_EQ(state->segments().size(), expected.size());
    for (const shm::Segment& segment : state->segments()) {
      const std::string name(shm::SegmentKindName(segment.kind()));
      EXPECT_EQ(segment.bytes(), policy::SegmentBytes(expected, name)) << name;
      struct stat stat;
      ASSERT_EQ(fstat(segment.fd(), &stat), 0);
      EXPECT_EQ(static_cast<uint64_t>(stat.st_size), segment.bytes()) << name;
      // Reserved, not sparse.
      EXPECT_GE(static_cast<uint64_t>(stat.st_blocks) * 512, segment.bytes())
          << name;
    }
  }
}

TEST(HostStateTest, WordsCarryTheHashesThatAWorkerChecks) {
  const model::StateLayout layout = Layout();
  const policy::Plan plan =
      TwoRanks(policy::GradRoute::kGpuRoot, policy::UpdateMode::kEager);
  ASSERT_OK_AND_ASSIGN(auto state, HostState::Create("j", layout, plan));
  shm::WordsHeader expected = {};
  expected.world_size = 2;
  expected.units = layout.units.size();
  expected.buckets = policy::MakeGradBuckets(layout, plan).size();
  expected.rows = policy::ReportedRows(layout);
  expected.state_layout_hash = layout.hash;
  expected.plan_hash = policy::PlanHash(plan);
  int checked = 0;
  for (const shm::Segment& segment : state->segments()) {
    if (segment.kind() == shm::SegmentKind::kVersions) {
      ++checked;
      EXPECT_OK(shm::Versions::Check(
          segment.mapping().data(),
          shm::Versions::Bytes(expected.world_size, expected.units), expected));
    } else if (segment.kind() == shm::SegmentKind::kReports) {
      ++checked;
      EXPECT_OK(shm::Reports::Check(
          segment.mapping().data(),
          shm::Reports::Bytes(expected.world_size, expected.buckets,
                              expected.rows),
          expected));
    }
  }
  EXPECT_EQ(checked, 2);
  EXPECT_EQ(state->versions().param_version(0).load(), 0u);
  EXPECT_EQ(state->reports().grad_ready(1).load(), 0u);
}

TEST(HostStateTest, PlanesOfAllUnitsAreDisjointAndStartAtZero) {
  const model::StateLayout layout = Layout();
  ASSERT_OK_AND_ASSIGN(
      auto state, HostState::Create("j", layout,
                                    TwoRanks(policy::GradRoute::kCpu,
                                             policy::UpdateMode::kDeferred)));
  // Every element of every plane gets its own value; none overwrites another.
  uint32_t next = 1;
  for (int pass = 0; pass < 2; ++pass) {
    uint32_t value = next;
    for (int u = 0; u < static_cast<int>(layout.units.size()); ++u) {
      const PlaneSpan p = state->planes(u, 0, layout.units[u].count);
      bf16* reduced = state->reduced(u, 0);
      ASSERT_NE(reduced, nullptr);
      for (uint64_t i = 0; i < p.count; ++i, ++value) {
        if (pass == 0) {
          ASSERT_EQ(p.hi[i] | p.lo[i] | reduced[i], 0);
          ASSERT_EQ(p.m[i], 0.0f);
          ASSERT_EQ(p.v[i], 0.0f);
          p.hi[i] = static_cast<bf16>(value);
          p.lo[i] = static_cast<int16_t>(value * 3);
          p.m[i] = static_cast<float>(value);
          p.v[i] = static_cast<float>(value) + 0.5f;
          reduced[i] = static_cast<bf16>(value * 7);
        } else {
          ASSERT_EQ(p.hi[i], static_cast<bf16>(value));
          ASSERT_EQ(p.lo[i], static_cast<int16_t>(value * 3));
          ASSERT_EQ(p.m[i], static_cast<float>(value));
          ASSERT_EQ(p.v[i], static_cast<float>(value) + 0.5f);
          ASSERT_EQ(reduced[i], static_cast<bf16>(value * 7));
        }
      }
    }
  }
}

TEST(HostStateTest, ReducedPlaneOnlyWhereHostdSumsIntoIt) {
  const model::StateLayout layout = Layout();
  const struct {
    policy::GradRoute route;
    policy::UpdateMode mode;
    bool reduced;
  } cases[] = {
      {policy::GradRoute::kCpu, policy::UpdateMode::kDeferred, true},
      {policy::GradRoute::kCpu, policy::UpdateMode::kEager, false},
      {policy::GradRoute::kGpuRoot, policy::UpdateMode::kDeferred, false},
  };
  for (const auto& c : cases) {
    ASSERT_OK_AND_ASSIGN(
        auto state, HostState::Create("j", layout, TwoRanks(c.route, c.mode)));
    EXPECT_EQ(state->reduced(0, 0) != nullptr, c.reduced);
  }
}

TEST(HostStateTest, ChunksInFlightHaveSlotsOfTheirOwn) {
  const model::StateLayout layout = Layout();
  ASSERT_OK_AND_ASSIGN(auto state,
                       HostState::Create("j", layout,
                                         TwoRanks(policy::GradRoute::kCpu,
                                                  policy::UpdateMode::kEager)));
  const policy::GradSchedule& schedule = state->grad_schedule();
  std::set<const bf16*> slots;
  for (int r = 0; r < 2; ++r) {
    for (uint64_t n = 0; n < schedule.slots(r); ++n) {
      slots.insert(state->grad_chunk(r, n));
      EXPECT_EQ(state->grad_chunk(r, n),
                state->grad_chunk(r, n + schedule.chunks[r].size()));
    }
  }
  EXPECT_EQ(slots.size(), 6u);
  const bf16* before = nullptr;
  for (const bf16* slot : slots) {
    if (before != nullptr) {
      EXPECT_GE(static_cast<uint64_t>(slot - before), schedule.chunk_elements);
    }
    before = slot;
  }
}

TEST(HostStateTest, FailureKeepsNoSegment) {
  policy::Plan plan =
      TwoRanks(policy::GradRoute::kGpuRoot, policy::UpdateMode::kEager);
  plan.d2h_chunk_bytes = uint64_t{1} << 44;  // one slot is 16 TiB of `grads`
  const int before = OpenDescriptors();
  const auto state = HostState::Create("j", Layout(), plan);
  EXPECT_THAT(state, testing::StatusIs(absl::StatusCode::kResourceExhausted,
                                       ::testing::HasSubstr("grads")));
  EXPECT_EQ(OpenDescriptors(), before);
}

}  // namespace
}  // namespace slidedp::hostd
