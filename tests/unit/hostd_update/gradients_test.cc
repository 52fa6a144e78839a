// Sums and norms on the host, and the work list that follows from a schedule.
#include "hostd/update/gradients.h"

#include <bit>
#include <cmath>
#include <vector>

#include "common/model/layout.h"
#include "gtest/gtest.h"
#include "hostd/update/step_work.h"
#include "policy/plan.h"

namespace slidedp::hostd {
namespace {

constexpr bf16 Bits(float x) {
  return static_cast<bf16>(std::bit_cast<uint32_t>(x) >> 16);
}

TEST(GradientsTest, SumGoesInRankOrderInFloat32) {
  // (1 + 2^-30) - 1 is 0 in float32; in any order with 1 and -1 first it isn't.
  const std::vector<bf16> a = {Bits(1.0f)}, b = {Bits(0x1p-30f)},
                          c = {Bits(-1.0f)};
  float sum = 9;
  const bf16* in_order[] = {a.data(), b.data(), c.data()};
  SumGradients(in_order, 0, 1, &sum);
  EXPECT_EQ(sum, 0.0f);
  const bf16* other[] = {a.data(), c.data(), b.data()};
  SumGradients(other, 0, 1, &sum);
  EXPECT_EQ(sum, 0x1p-30f);
}

TEST(GradientsTest, SumKeepsMoreThanABfloat16) {
  const std::vector<bf16> a = {Bits(256.0f)}, b = {Bits(1.0f)};
  const bf16* sources[] = {a.data(), b.data()};
  float sum;
  SumGradients(sources, 0, 1, &sum);
  EXPECT_EQ(sum, 257.0f);
}

TEST(GradientsTest, SumTakesARangeAndOneSourceToo) {
  const std::vector<bf16> a = {Bits(1), Bits(2), Bits(3), Bits(4)};
  const bf16* sources[] = {a.data()};
  float sum[3] = {-1, -1, -1};
  SumGradients(sources, 1, 2, sum);
  EXPECT_EQ(sum[0], 2.0f);
  EXPECT_EQ(sum[1], 3.0f);
  EXPECT_EQ(sum[2], -1.0f);
}

TEST(GradientsTest, SquareNormOfEverySizeAndBothTypes) {
  for (uint64_t count = 0; count < 40; ++count) {
    std::vector<bf16> g;
    std::vector<float> f;
    double expected = 0;
    for (uint64_t i = 0; i < count; ++i) {
      const float x = (i % 2 ? -1.0f : 1.0f) * static_cast<float>(i + 1);
      g.push_back(Bits(x));
      f.push_back(x);
      expected += x * x;
    }
    EXPECT_EQ(SquareNorm(g.data(), count), expected);
    EXPECT_EQ(SquareNorm(f.data(), count), expected);
  }
}

TEST(GradientsTest, SquareNormDoesNotOverflowAndKeepsNan) {
  const std::vector<bf16> largest(1000, 0x7f7f);
  EXPECT_TRUE(std::isfinite(SquareNorm(largest.data(), largest.size())));
  std::vector<bf16> g(11, Bits(1));
  g[10] = 0x7fc0;
  EXPECT_TRUE(std::isnan(SquareNorm(g.data(), g.size())));
  g[10] = 0x7f80;
  EXPECT_TRUE(std::isinf(SquareNorm(g.data(), g.size())));
}

model::StateLayout TwoUnits(uint64_t first, uint64_t second) {
  model::StateLayout layout;
  for (uint64_t count : {first, second}) {
    model::Unit unit = {};
    unit.kind = layout.units.empty() ? model::UnitKind::kEmbedding
                                     : model::UnitKind::kDecoder;
    unit.layer = static_cast<int64_t>(layout.units.size()) - 1;
    unit.count = count;
    unit.plane_offset = layout.plane_elements;
    model::Tensor all = {};  // a unit without a trained tensor is frozen
    all.count = count;
    unit.tensors.push_back(all);
    layout.plane_elements += count;
    layout.units.push_back(unit);
  }
  return layout;
}

TEST(StepWorkTest, RanksWithoutAShardDrainNothing) {
  // 128 elements over 3 ranks: shards of 64, so the third rank has none.
  const model::StateLayout layout = TwoUnits(128, 1280);
  policy::Plan plan;
  plan.ranks = 3;
  plan.embedding.grads = policy::GradRoute::kGpuSharded;
  plan.decoder.grads = policy::GradRoute::kCpu;
  plan.update_mode = policy::UpdateMode::kEager;
  plan.d2h_chunk_bytes = 256;
  plan.ring_chunks = 2;
  const StepWork work =
      MakeStepWork(layout, plan, policy::MakeGradSchedule(layout, plan));
  ASSERT_EQ(work.buckets.size(), 2u);
  EXPECT_EQ(work.buckets[0].unit, 1);
  EXPECT_EQ(work.buckets[0].draining_ranks, (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(work.buckets[1].unit, 0);
  EXPECT_EQ(work.buckets[1].draining_ranks, (std::vector<int>{0, 1}));
  EXPECT_FALSE(work.units[0].host_sums);
  EXPECT_TRUE(work.units[1].host_sums);
  ASSERT_EQ(work.units[1].pieces, 10);
  for (int i = 0; i < 10; ++i) {
    const Piece& piece = work.pieces[work.units[1].first_piece + i];
    EXPECT_EQ(piece.begin, 128u * i);
    ASSERT_EQ(piece.chunks.size(), 3u);
    for (int r = 0; r < 3; ++r) {
      EXPECT_EQ(piece.chunks[r].rank, r);
      EXPECT_EQ(work.piece_of[r][piece.chunks[r].index],
                work.units[1].first_piece + i);
    }
  }
}

// Chunks whose slots are needed again within the step, as they come. Those with
// slots of their own and the last ring's worth have no turn, so go by unit.
TEST(StepWorkTest, WhatAFullRingWaitsForHasATurn) {
  const model::StateLayout layout = TwoUnits(256, 1280);
  policy::Plan plan;
  plan.ranks = 1;
  plan.d2h_chunk_bytes = 256;
  plan.own_chunks = 2;
  plan.ring_chunks = 5;
  for (const auto mode :
       {policy::UpdateMode::kEager, policy::UpdateMode::kDeferred}) {
    plan.update_mode = mode;
    const policy::GradSchedule schedule =
        policy::MakeGradSchedule(layout, plan);
    const StepWork work = MakeStepWork(layout, plan, schedule);
    ASSERT_EQ(work.piece_of[0].size(), 12u);
    for (uint64_t n = 0; n < 12; ++n) {
      const bool waited_for =
          mode == policy::UpdateMode::kEager && n >= 2 && n + 5 < 12;
      EXPECT_EQ(work.pieces[work.piece_of[0][n]].turn,
                waited_for ? n : kLastTurn);
    }
  }
}

TEST(StepWorkTest, UnitsAreNamedForPeople) {
  const model::StateLayout layout = TwoUnits(128, 128);
  EXPECT_EQ(DescribeUnit(layout, 0), "unit 0 (embedding)");
  EXPECT_EQ(DescribeUnit(layout, 1), "unit 1 (decoder layer 0)");
}

}  // namespace
}  // namespace slidedp::hostd
