#include "policy/plan.h"

#include <set>

#include "common/base/units.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "policy/wire.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/policy/problems.h"

namespace slidedp::policy {
namespace {

using ::slidedp::testing::StatusIs;
using ::testing::HasSubstr;

// 12 bytes per parameter, and 2 more for whole gradients.
TEST(HostSegmentsTest, TwelveBytesPerParameter) {
  const Problem problem = TinyProblem(2);
  ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(problem));
  const model::StateLayout layout = model::MakeStateLayout(problem.config);
  const auto segments = HostSegments(layout, plan);
  EXPECT_EQ(SegmentBytes(segments, "params") + SegmentBytes(segments, "state"),
            12 * layout.plane_elements);
  uint64_t counted = 0;
  for (const model::Unit& unit : layout.units) counted += unit.count;
  EXPECT_GE(SegmentBytes(segments, "grads"), 2 * counted);
}

TEST(HostSegmentsTest, CpuRouteKeepsSumsInDeferredModeOnly) {
  Problem problem = TinyProblem(2);
  const model::StateLayout layout = model::MakeStateLayout(problem.config);
  problem.grads = GradRoute::kCpu;
  ASSERT_OK_AND_ASSIGN(Plan plan, MakePlan(problem));
  EXPECT_EQ(MakeStatePlanes(layout, plan).bytes, 12 * layout.plane_elements);
  problem.clipping = false;
  ASSERT_OK_AND_ASSIGN(plan, MakePlan(problem));
  EXPECT_EQ(MakeStatePlanes(layout, plan).bytes, 10 * layout.plane_elements);
}

TEST(DeviceBuffersTest, NamesAreUniqueAndSizesWholePages) {
  for (int ranks : {1, 3}) {
    Problem problem = TinyProblem(ranks);
    ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(problem));
    std::set<std::string> names;
    for (const NamedBytes& b : DeviceBuffers(
             problem.config, model::MakeStateLayout(problem.config), plan)) {
      EXPECT_TRUE(names.insert(b.name).second) << b.name;
      EXPECT_EQ(b.bytes % kPageBytes, 0u) << b.name;
      EXPECT_GT(b.bytes, 0u) << b.name;
    }
  }
}

TEST(DeviceBuffersTest, PackedPlansHaveRoomForTheirDocuments) {
  Problem problem = TinyProblem(1);
  problem.documents_per_sequence = 5;
  ASSERT_OK_AND_ASSIGN(Plan plan, MakePlan(problem));
  const int64_t rows = plan.micro_batches * plan.micro_batch_tokens();
  // Ids, labels and first rows; an offset for each document and the end.
  EXPECT_EQ(plan.batch_ints(),
            3 * rows + plan.micro_batches * (plan.micro_batch_size * 5 + 1));
  const auto buffers = DeviceBuffers(
      problem.config, model::MakeStateLayout(problem.config), plan);
  EXPECT_GE(Bytes(buffers, "tokens"), 2 * 4 * plan.batch_ints());
  EXPECT_EQ(Bytes(buffers, "tokens"), Bytes(buffers, "pinned.tokens"));
  const uint64_t packed = PlanHash(plan);
  plan.documents_per_sequence = 0;
  EXPECT_EQ(plan.batch_ints(), 2 * rows);
  EXPECT_NE(PlanHash(plan), packed);
  problem.documents_per_sequence = problem.sequence_length + 1;
  EXPECT_THAT(MakePlan(problem), StatusIs(absl::StatusCode::kInvalidArgument,
                                          HasSubstr("documents_per_sequence")));
}

TEST(DeviceBuffersTest, KeptSegmentsAreCountedToTheByte) {
  Problem problem = LargeProblem();
  problem.batch_size = 16;  // two micro-batches
  problem.kept_layers = 35;
  problem.keep_mask = Bit(Segment::kRotated);
  ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(problem));
  EXPECT_EQ(plan.keep.front(), Bit(Segment::kRotated));
  EXPECT_EQ(plan.keep[1], kKeepAll);
  EXPECT_EQ(plan.keep.back(), kKeepAll);
  const auto buffers = DeviceBuffers(
      problem.config, model::MakeStateLayout(problem.config), plan);
  const uint64_t t = 8 * 4096, all = 35 * 2 * t, one = 1 * 2 * t;
  EXPECT_EQ(Bytes(buffers, "kept.qkv"), all * 6144 * 2);
  EXPECT_EQ(Bytes(buffers, "kept.attention"), all * (4096 * 2 + 32 * 4));
  EXPECT_EQ(Bytes(buffers, "kept.middle"), all * 4096 * 2);
  EXPECT_EQ(Bytes(buffers, "kept.gate_up"), all * 2 * 12288 * 2);
  EXPECT_EQ(Bytes(buffers, "kept.rotated"), one * (6144 * 2 + 40 * 4));
  EXPECT_EQ(Bytes(buffers, "kept.rstd"), 36 * 2 * t * 2 * 4);
  EXPECT_EQ(Bytes(buffers, "kept.input_norm"), 0u);
  // Layer 0 computes in the scratch what it does not keep.
  EXPECT_EQ(Bytes(buffers, "layer.gate_up"), t * 2 * 12288 * 2);
}

TEST(DeviceBuffersTest, WhatEveryLayerKeepsHasNoScratch) {
  Problem problem = LargeProblem();
  problem.kept_layers = 36;
  ASSERT_OK_AND_ASSIGN(Plan plan, MakePlan(problem));
  const model::StateLayout layout = model::MakeStateLayout(problem.config);
  auto buffers = DeviceBuffers(problem.config, layout, plan);
  for (const char* name :
       {"layer.qkv", "layer.attention", "layer.middle", "layer.gate_up"}) {
    EXPECT_EQ(Bytes(buffers, name), 0u) << name;
  }
  EXPECT_GT(Bytes(buffers, "layer.rotated"), 0u);
  // Without QK-norm projections turn in place: one buffer for both.
  problem.config.qk_norm = false;
  buffers = DeviceBuffers(problem.config, layout, plan);
  EXPECT_EQ(Bytes(buffers, "kept.qkv"), 0u);
  EXPECT_EQ(Bytes(buffers, "layer.qkv"), 0u);
  EXPECT_EQ(Bytes(buffers, "layer.rotated"), 0u);
  EXPECT_EQ(Bytes(buffers, "kept.rotated"), 36ull * 8 * 4096 * 6144 * 2);
}

TEST(DeviceBuffersTest, Float32ActivationsAreTwiceAsLarge) {
  Problem problem = LargeProblem();
  problem.head_chunk_tokens = 256;
  const model::StateLayout layout = model::MakeStateLayout(problem.config);
  ASSERT_OK_AND_ASSIGN(Plan plan, MakePlan(problem));
  const auto narrow = DeviceBuffers(problem.config, layout, plan);
  problem.float32 = true;
  ASSERT_OK_AND_ASSIGN(plan, MakePlan(problem));
  const auto wide = DeviceBuffers(problem.config, layout, plan);
  for (const char* name :
       {"inputs", "d_hidden", "layer.middle", "head.logits"}) {
    EXPECT_EQ(Bytes(wide, name), 2 * Bytes(narrow, name)) << name;
  }
}

TEST(MakePlanTest, BatchIsSpreadOverRanksWithoutRemainder) {
  Problem problem = TinyProblem(3);
  problem.batch_size = 10;
  problem.micro_batch_size = 2;
  ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(problem));
  EXPECT_EQ(plan.micro_batches, 2);  // 12 places for 10 sequences
}

TEST(MakePlanTest, RanksThatCannotExchangeUseHostRoutes) {
  Problem problem = TinyProblem(2);
  problem.peer_access = false;
  ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(problem));
  EXPECT_EQ(plan.decoder.params, ParamRoute::kFull);
  EXPECT_EQ(plan.decoder.grads, GradRoute::kCpu);
  problem.grads = GradRoute::kGpuSharded;
  EXPECT_THAT(MakePlan(problem),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("routes.grads = gpu_sharded")));
}

TEST(MakePlanTest, NonsenseIsRefusedWithItsField) {
  const std::vector<std::pair<std::function<void(Problem&)>, std::string>>
      cases = {
          {[](Problem& p) { p.ranks = 0; }, "ranks = 0"},
          {[](Problem& p) { p.ranks = 65; }, "ranks = 65"},
          {[](Problem& p) { p.sequence_length = 0; }, "sequence_length = 0"},
          {[](Problem& p) { p.batch_size = -1; }, "batch_size = -1"},
          {[](Problem& p) { p.micro_batch_size = int64_t{1} << 40; },
           "micro_batch_size"},
          {[](Problem& p) { p.d2h_chunk_bytes = 100; },
           "d2h_chunk_bytes = 100"},
          {[](Problem& p) { p.h2d_chunk_bytes = 2 * kGiB; }, "h2d_chunk_bytes"},
          {[](Problem& p) { p.window_slots = 5000; }, "window_slots"},
          {[](Problem& p) { p.ring_chunks = 1 << 20; }, "ring_chunks"},
          {[](Problem& p) { p.own_chunks = 1 << 20; }, "own_chunks"},
      };
  for (const auto& [change, field] : cases) {
    Problem problem = TinyProblem(1);
    change(problem);
    EXPECT_THAT(MakePlan(problem),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(field)));
  }
}

TEST(MakePlanTest, ASixthOfAnEagerStepsGradientsHasSlotsOfItsOwn) {
  Problem problem = TinyProblem(/*ranks=*/1, /*tied=*/false);
  problem.clipping = false;
  problem.d2h_chunk_bytes = 128;
  ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(problem));
  const GradSchedule schedule =
      MakeGradSchedule(model::MakeStateLayout(problem.config), plan);
  const uint64_t chunks = schedule.chunks[0].size();
  ASSERT_GT(chunks, 100u);
  EXPECT_EQ(schedule.own[0], chunks / 6);
  EXPECT_EQ(schedule.ring[0], 4u);
}

TEST(MakePlanTest, AKindOfUnitMayHaveRoutesOfItsOwn) {
  Problem problem = TinyProblem(2);
  problem.params = ParamRoute::kSharded;
  problem.grads = GradRoute::kGpuRoot;
  problem.embedding.grads = GradRoute::kCpu;
  problem.head.params = ParamRoute::kFull;
  ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(problem));
  EXPECT_EQ(plan.embedding.grads, GradRoute::kCpu);
  EXPECT_EQ(plan.decoder.grads, GradRoute::kGpuRoot);
  EXPECT_EQ(plan.head.params, ParamRoute::kFull);
  EXPECT_EQ(plan.decoder.params, ParamRoute::kSharded);
  problem.peer_access = false;
  problem.params.reset();
  problem.grads.reset();
  problem.head.params = ParamRoute::kSharded;
  EXPECT_THAT(MakePlan(problem),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("tuning.head_routes.params = sharded")));
}

TEST(WireTest, PlanSurvivesTheWire) {
  Problem problem = TinyProblem(3);
  problem.grads = GradRoute::kCpu;
  problem.reduce = ReduceDType::kBf16;
  problem.clipping = false;
  problem.keep = {kKeepSelective, 0};
  problem.offload_permille = {0, 300};
  problem.stage_slots = 5;
  problem.embedding.reduce = ReduceDType::kF32;
  problem.documents_per_sequence = 2;
  ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(problem));
  ASSERT_OK_AND_ASSIGN(const Plan back, FromWire(ToWire(plan)));
  EXPECT_EQ(PlanHash(back), PlanHash(plan));
  EXPECT_EQ(back.compute_threads, plan.compute_threads);
  EXPECT_EQ(back.update_threads, plan.update_threads);
}

TEST(WireTest, IncompletePlansAreRefused) {
  ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(TinyProblem(2)));
  v1::Plan wire = ToWire(plan);
  wire.mutable_decoder()->clear_grads();
  EXPECT_THAT(FromWire(wire), StatusIs(absl::StatusCode::kInvalidArgument));
  wire = ToWire(plan);
  wire.set_version(2);
  EXPECT_THAT(FromWire(wire), StatusIs(absl::StatusCode::kInvalidArgument,
                                       HasSubstr("version = 2")));
  wire = ToWire(plan);
  wire.set_micro_batches(0);
  EXPECT_THAT(FromWire(wire), StatusIs(absl::StatusCode::kInvalidArgument,
                                       HasSubstr("micro_batches")));
  wire = ToWire(plan);
  wire.set_offload_permille(1, 1001);
  EXPECT_THAT(FromWire(wire), StatusIs(absl::StatusCode::kInvalidArgument,
                                       HasSubstr("offload_permille = 1001")));
  wire.set_documents_per_sequence(wire.sequence_length() + 1);
  EXPECT_THAT(FromWire(wire), StatusIs(absl::StatusCode::kInvalidArgument,
                                       HasSubstr("documents_per_sequence")));
}

}  // namespace
}  // namespace slidedp::policy
