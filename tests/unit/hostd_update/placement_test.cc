// Where planes and gradients go on hosts of several NUMA nodes, how threads are
// spread over them, and that the kernel does as it is told.
#include "hostd/store/placement.h"

#include <numaif.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/backoff.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hostd/store/bind.h"
#include "hostd/update/node_pools.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/tiny_model.h"

namespace slidedp::hostd {
namespace {

using ::testing::ElementsAre;
using ::testing::SizeIs;

struct PlacedJob {
  model::StateLayout layout;
  policy::Plan plan;
};

PlacedJob Tiny(int ranks, policy::GradRoute route, int64_t hidden = 64) {
  testing::TinyModelOptions options;
  options.hidden = hidden;
  options.vocab = 500;
  PlacedJob job;
  job.layout = model::MakeStateLayout(testing::TinyConfig(options));
  job.plan.ranks = ranks;
  job.plan.embedding.grads = job.plan.decoder.grads = job.plan.head.grads =
      route;
  job.plan.d2h_chunk_bytes = job.plan.h2d_chunk_bytes = 8192;
  job.plan.ring_chunks = 4;
  return job;
}

std::vector<NumaNode> Nodes(int count) {
  std::vector<NumaNode> nodes;
  for (int n = 0; n < count; ++n) {
    nodes.push_back({10 + n, uint64_t{1} << 36, {2 * n, 2 * n + 1}});
  }
  return nodes;
}

TEST(PlacementTest, OneNodeIsNoPlacement) {
  const PlacedJob job = Tiny(2, policy::GradRoute::kGpuSharded);
  const Placement placement =
      MakePlacement(job.layout, job.plan, Nodes(1), {0, 0});
  EXPECT_EQ(placement.node_count(), 1);
  EXPECT_EQ(placement.NodeOf(1, 12345), 0);
}

TEST(PlacementTest, NodesGetEqualPartsOfEveryUnit) {
  for (int count : {2, 4}) {
    const PlacedJob job = Tiny(1, policy::GradRoute::kGpuRoot);
    const Placement placement =
        MakePlacement(job.layout, job.plan, Nodes(count), {});
    ASSERT_THAT(placement.units, SizeIs(job.layout.units.size()));
    for (size_t u = 0; u < job.layout.units.size(); ++u) {
      const int unit = static_cast<int>(u);
      const uint64_t elements = job.layout.units[u].count;
      std::map<int, uint64_t> sizes;
      int before = 0;
      for (uint64_t i = 0; i < elements; i += 64) {
        const int node = placement.NodeOf(unit, i);
        ASSERT_GE(node, before);
        before = node;
        sizes[node] += 64;
      }
      for (const auto& [node, size] : sizes) {
        EXPECT_LE(size, elements / count + kPartElements + 128);
      }
      if (elements > count * kPartElements) {
        EXPECT_THAT(sizes, SizeIs(count));
      }
    }
  }
}

TEST(PlacementTest, ShardsLieWhereTheirRanksGpusAre) {
  const PlacedJob job = Tiny(4, policy::GradRoute::kGpuSharded, 256);
  const std::vector<int> rank_nodes = {1, 0, 0, 1};
  const Placement placement =
      MakePlacement(job.layout, job.plan, Nodes(2), rank_nodes);
  int seen = 0;
  for (const policy::GradBucket& bucket :
       policy::MakeGradBuckets(job.layout, job.plan)) {
    for (int r = 0; r < 4; ++r) {
      const policy::GradShard shard = policy::ShardOf(bucket, r, 4);
      // A page that several shards share lies with the last one.
      const uint64_t begin = AlignUp(shard.begin, kPartElements);
      if (begin + kPartElements > shard.end) continue;
      ++seen;
      EXPECT_EQ(placement.NodeOf(bucket.unit, begin), rank_nodes[r]);
    }
  }
  EXPECT_GT(seen, 4);
  // A node without a rank still lends its memory.
  for (const std::vector<int>& unusable :
       std::vector<std::vector<int>>{{0, 0, 0, 0}, {0, 1, -1, 0}, {}}) {
    const Placement even =
        MakePlacement(job.layout, job.plan, Nodes(2), unusable);
    EXPECT_EQ(even.NodeOf(1, 0), 0);
    EXPECT_EQ(even.NodeOf(1, job.layout.units[1].count - 1), 1);
  }
}

// Every page of a plane that holds elements has one node, and that is the node
// of an element on it.
TEST(PlacementTest, RangesCoverThePlanesPages) {
  const PlacedJob job = Tiny(3, policy::GradRoute::kGpuSharded);
  const Placement placement =
      MakePlacement(job.layout, job.plan, Nodes(2), {0, 1, 0});
  for (uint64_t element_bytes : {2u, 4u}) {
    const std::vector<PlacedRange> ranges =
        PlacePlane(job.layout, placement, 3 * kPageBytes, element_bytes);
    std::map<uint64_t, int> node_of_page;
    for (const PlacedRange& range : ranges) {
      ASSERT_EQ(range.begin_bytes % kPageBytes, 0u);
      ASSERT_EQ(range.end_bytes % kPageBytes, 0u);
      for (uint64_t at = range.begin_bytes; at < range.end_bytes;
           at += kPageBytes) {
        ASSERT_TRUE(node_of_page.emplace(at, range.node).second);
      }
    }
    for (size_t u = 0; u < job.layout.units.size(); ++u) {
      const model::Unit& unit = job.layout.units[u];
      for (uint64_t i = 0; i < unit.count; ++i) {
        const uint64_t at =
            3 * kPageBytes + (unit.plane_offset + i) * element_bytes;
        const auto page = node_of_page.find(at / kPageBytes * kPageBytes);
        ASSERT_NE(page, node_of_page.end());
        ASSERT_EQ(page->second, placement.NodeOf(static_cast<int>(u), i))
            << "unit " << u << " element " << i;
      }
    }
  }
}

TEST(PlacementTest, SlotsLieWithTheirChunksUnlessTheyAreReused) {
  PlacedJob job = Tiny(2, policy::GradRoute::kGpuSharded, 256);
  const Placement placement =
      MakePlacement(job.layout, job.plan, Nodes(2), {0, 1});
  const policy::GradSchedule schedule =
      policy::MakeGradSchedule(job.layout, job.plan);
  const std::vector<PlacedRange> ranges = PlaceGradients(schedule, placement);
  int seen = 0;
  for (int r = 0; r < 2; ++r) {
    for (uint64_t i = 0; i < schedule.chunks[r].size(); ++i) {
      const policy::GradChunk& chunk = schedule.chunks[r][i];
      // A page that several slots share lies with the first one.
      const uint64_t begin = schedule.slot_offset_bytes(r, i);
      const uint64_t at = AlignUp(begin, kPageBytes);
      if (at >= begin + 2 * chunk.count) continue;
      ++seen;
      const auto range = std::ranges::find_if(ranges, [&](const auto& each) {
        return each.begin_bytes <= at && at < each.end_bytes;
      });
      ASSERT_NE(range, ranges.end());
      EXPECT_EQ(range->node, placement.NodeOf(chunk.unit, chunk.begin));
    }
  }
  EXPECT_GT(seen, 20);
  job.plan.update_mode = policy::UpdateMode::kEager;
  EXPECT_THAT(
      PlaceGradients(policy::MakeGradSchedule(job.layout, job.plan), placement),
      SizeIs(0));
}

TEST(NodePoolsTest, ThreadsFollowTheCpus) {
  EXPECT_THAT(SpreadThreads({8}, 5), ElementsAre(5));
  EXPECT_THAT(SpreadThreads({8, 8}, 5), ElementsAre(3, 2));
  EXPECT_THAT(SpreadThreads({12, 4}, 8), ElementsAre(6, 2));
  EXPECT_THAT(SpreadThreads({4, 4, 4, 4}, 2), ElementsAre(1, 1, 1, 1));
}

TEST(NodePoolsTest, EachNodesTasksRunOnItsThreadsLowestFirst) {
  Placement placement;
  placement.nodes = Nodes(2);
  for (NumaNode& node : placement.nodes) node.cpus = {0};
  std::mutex mutex;
  std::vector<int> units[2];
  std::map<std::tuple<int, int, uint64_t>, int> runs;
  std::atomic<int> done = 0;
  std::atomic<bool> go = false;
  NodePools pools(placement, 2,
                  [&](const Task& task, uint64_t slice, int thread) {
                    Backoff backoff;
                    while (!go) backoff.Pause();
                    std::lock_guard lock(mutex);
                    units[thread].push_back(task.unit);
                    ++runs[{thread, task.unit, slice}];
                    ++done;
                  });
  ASSERT_EQ(pools.threads(), 2);
  for (int unit : {5, 3, 9}) {
    pools.Push(unit == 3 ? 1 : 0, {unit, TaskKind::kUpdate, 7}, 2, 5);
  }
  pools.Push(0, {1, TaskKind::kUpdate, 7}, 0, 3);
  pools.Push(0, {8, TaskKind::kUpdate, 7, /*turn=*/20}, 0, 1);
  pools.Push(0, {2, TaskKind::kUpdate, 7, /*turn=*/21}, 0, 1);
  go = true;
  Backoff backoff;
  while (done < 14) backoff.Pause();
  EXPECT_THAT(runs, SizeIs(14));  // every slice once
  std::lock_guard lock(mutex);
  EXPECT_EQ(units[1], (std::vector<int>{3, 3, 3}));
  // What thread 0 had taken before the lower task came stands first.
  ASSERT_THAT(units[0], SizeIs(11));
  EXPECT_EQ(units[0].back(), 9);
  // What has a turn comes first.
  const auto eight = std::find(units[0].begin(), units[0].end(), 8);
  EXPECT_LE(eight - units[0].begin(), 1);
  ASSERT_LT(eight, units[0].end() - 2);
  EXPECT_EQ(eight[1], 2);
  EXPECT_TRUE(std::is_sorted(eight + 2, units[0].end()));
}

TEST(NodePoolsTest, DrainDropsWhatIsQueuedAndWaitsForTheRest) {
  std::atomic<int> running = 0, finished = 0;
  std::atomic<bool> go = false;
  NodePools pools({}, 2, [&](const Task&, uint64_t, int) {
    ++running;
    Backoff backoff;
    while (!go) backoff.Pause();
    ++finished;
  });
  pools.Push(0, {0, TaskKind::kUpdate, 0}, 0, 1000);
  Backoff backoff;
  while (running < 2) backoff.Pause();
  std::thread release([&] { go = true; });
  pools.Drain();
  const int at_drain = finished;
  EXPECT_EQ(running, at_drain);
  release.join();
  pools.Close();
  pools.Push(0, {0, TaskKind::kUpdate, 0}, 0, 1000);
  pools.Drain();
}

// The node's count of pages that an interleaving policy has placed.
std::optional<uint64_t> InterleavedPages(int node) {
  std::ifstream file(
      absl::StrCat("/sys/devices/system/node/node", node, "/numastat"));
  std::string name;
  uint64_t value;
  while (file >> name >> value) {
    if (name == "interleave_hit") return value;
  }
  return std::nullopt;
}

// What Segment::Create relies on: reserving obeys a policy that was set on a
// mapping before. With a single node only an interleaving policy leaves a
// trace; the kernel looks all policies up in the same place.
TEST(BindTest, ReservingAllocatesByTheMappingsPolicy) {
  constexpr uint64_t kBytes = uint64_t{32} << 20;
  const std::optional<uint64_t> before = InterleavedPages(0);
  if (!before.has_value()) GTEST_SKIP() << "no NUMA statistics";
  bool placed = false;
  ASSERT_OK_AND_ASSIGN(
      const shm::Segment segment,
      shm::Segment::Create(shm::SegmentKind::kState, kBytes, "bind",
                           [&](const shm::Mapping& mapping) {
                             const unsigned long nodes = 1;
                             placed =
                                 mbind(mapping.data(), kBytes, MPOL_INTERLEAVE,
                                       &nodes, 64, 0) == 0;
                           }));
  if (!placed) GTEST_SKIP() << "this system refuses mbind";
  // The counters of each CPU are added up every second.
  Backoff backoff;
  for (int i = 0; i < 10'000; ++i) {
    if (*InterleavedPages(0) >= *before + kBytes / kPageBytes) break;
    backoff.Pause();
  }
  EXPECT_GE(*InterleavedPages(0), *before + kBytes / kPageBytes);
}

TEST(BindTest, PolicyIsTheSegmentsForEveryMapping) {
  constexpr uint64_t kBytes = uint64_t{1} << 20;
  Placement placement;
  placement.nodes = {{0, 1, {0}}};
  ASSERT_OK_AND_ASSIGN(
      const shm::Segment segment,
      shm::Segment::Create(shm::SegmentKind::kGrads, kBytes, "bind",
                           [&](const shm::Mapping& mapping) {
                             BindToNode(mapping, {0, kBytes / 2, 0}, placement);
                           }));
  ASSERT_OK_AND_ASSIGN(
      const shm::Mapping other,
      shm::Mapping::Map(segment.fd(), kBytes, shm::Access::kReadOnly, "other"));
  int mode = -1;
  unsigned long nodes = 0;  // NOLINT(google-runtime-int): the call's type
  if (get_mempolicy(&mode, &nodes, 64, other.at<char>(0), MPOL_F_ADDR) != 0) {
    GTEST_SKIP() << "this system refuses get_mempolicy";
  }
  EXPECT_EQ(mode, MPOL_PREFERRED);
  EXPECT_EQ(nodes, 1u);
  ASSERT_EQ(
      get_mempolicy(&mode, &nodes, 64, other.at<char>(kBytes / 2), MPOL_F_ADDR),
      0);
  EXPECT_EQ(mode, MPOL_DEFAULT);
}

}  // namespace
}  // namespace slidedp::hostd
