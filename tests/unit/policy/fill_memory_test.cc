#include "policy/fill_memory.h"

#include <algorithm>

#include "common/base/units.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/policy/problems.h"

namespace slidedp::policy {
namespace {

using ::slidedp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(KeepPlanTest, AnH200KeepsEveryLayerOfAnEightBillionModel) {
  Problem problem = LargeProblem();
  problem.device_memory_bytes = 134 * kGiB;
  ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(problem));
  EXPECT_THAT(plan.keep, Each(kKeepAll));
  EXPECT_LE(Needed(problem, plan), problem.device_memory_bytes);
}

TEST(KeepPlanTest, AsManyOfTheLastLayersAsFitThenTheWindow) {
  Problem problem = LargeProblem();
  for (uint64_t gib : {60, 80, 100, 120, 200}) {
    SCOPED_TRACE(gib);
    problem.device_memory_bytes = gib * kGiB;
    ASSERT_OK_AND_ASSIGN(Plan plan, MakePlan(problem));
    EXPECT_LE(Needed(problem, plan), problem.device_memory_bytes);
    EXPECT_TRUE(std::is_sorted(plan.keep.begin(), plan.keep.end()));
    EXPECT_GE(plan.window_slots, 3);
    // Neither one more slot nor, with the least window, one more layer.
    if (plan.window_slots < 36) {
      ++plan.window_slots;
      EXPECT_GT(Needed(problem, plan), problem.device_memory_bytes);
    }
    const auto first = std::find(plan.keep.begin(), plan.keep.end(), kKeepAll);
    if (first != plan.keep.begin()) {
      *(first - 1) = kKeepAll;
      plan.window_slots = 3;
      EXPECT_GT(Needed(problem, plan), problem.device_memory_bytes);
    } else {
      EXPECT_GE(gib, 120u);
    }
  }
  problem.window_slots = 4;
  ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(problem));
  EXPECT_EQ(plan.window_slots, 4);
}

TEST(KeepPlanTest, UnknownMemoryKeepsWhatIsAskedFor) {
  for (const auto device : {DeviceKind::kCpu, DeviceKind::kCuda}) {
    Problem problem = TinyProblem(1);
    problem.device = device;
    ASSERT_OK_AND_ASSIGN(Plan plan, MakePlan(problem));
    EXPECT_THAT(plan.keep, ElementsAre(0, 0));
    problem.kept_layers = 1;
    problem.keep_mask = Bit(Segment::kMiddle);
    ASSERT_OK_AND_ASSIGN(plan, MakePlan(problem));
    EXPECT_THAT(plan.keep, ElementsAre(Bit(Segment::kMiddle), kKeepAll));
  }
}

TEST(KeepPlanTest, WhatDoesNotFitIsRefusedWithItsBytes) {
  Problem problem = LargeProblem();
  problem.device_memory_bytes = 80 * kGiB;
  problem.kept_layers = 36;
  EXPECT_THAT(MakePlan(problem),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("tuning.kept_layers = 36"),
                             HasSubstr("80.00 GiB may be used"))));
  problem.kept_layers = 37;
  EXPECT_THAT(MakePlan(problem),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("the model has 36 layers")));
  problem.kept_layers.reset();
  problem.device_memory_bytes = 8 * kGiB;
  EXPECT_THAT(MakePlan(problem), StatusIs(absl::StatusCode::kInvalidArgument,
                                          HasSubstr("micro_batch_size = 8")));
}

// Less and less memory: never refused before everything has been tried, and
// what it takes is never more than there is.
TEST(KeepPlanTest, LittleMemoryOffloadsTheFirstInputsAndShrinksTheRest) {
  Problem problem = LargeProblem();
  int offloaded = 0;
  int fitted = 0;
  for (uint64_t gib = 40; gib >= 8; --gib) {
    SCOPED_TRACE(gib);
    problem.device_memory_bytes = gib * kGiB;
    const auto plan = MakePlan(problem);
    if (!plan.ok()) break;
    ++fitted;
    EXPECT_LE(Needed(problem, *plan), problem.device_memory_bytes);
    const auto& shares = plan->offload_permille;
    const auto kept = std::find(shares.begin(), shares.end(), 0);
    EXPECT_TRUE(std::all_of(shares.begin(), kept,
                            [](uint16_t s) { return s == kOffloadAll; }));
    EXPECT_TRUE(
        std::all_of(kept, shares.end(), [](uint16_t s) { return s == 0; }));
    offloaded = static_cast<int>(kept - shares.begin());
    if (plan->grad_slots < 2) {
      EXPECT_LE(plan->window_slots, 2);
    }
  }
  EXPECT_GT(offloaded, 30);
  EXPECT_GE(fitted, 20);
}

TEST(KeepPlanTest, CheaperMasksFillWhatNoWholeLayerFits) {
  Problem problem = LargeProblem();
  problem.window_slots = 3;
  bool selective = false, attention = false;
  for (uint64_t mib = 50000; mib < 54000; mib += 250) {
    problem.device_memory_bytes = mib * kMiB;
    ASSERT_OK_AND_ASSIGN(Plan plan, MakePlan(problem));
    EXPECT_LE(Needed(problem, plan), problem.device_memory_bytes);
    for (const uint8_t mask : plan.keep) {
      selective |= mask == kKeepSelective;
      attention |= mask == Bit(Segment::kAttention);
    }
    // Not one attention more.
    const auto none = std::find_if(plan.keep.rbegin(), plan.keep.rend(),
                                   [](uint8_t mask) { return mask == 0; });
    ASSERT_NE(none, plan.keep.rend());
    *none = Bit(Segment::kAttention);
    EXPECT_GT(Needed(problem, plan), problem.device_memory_bytes);
  }
  EXPECT_TRUE(selective);
  EXPECT_TRUE(attention);
}

TEST(KeepPlanTest, ChoicesOfTheUserStand) {
  Problem problem = LargeProblem();
  problem.device_memory_bytes = 60 * kGiB;
  problem.keep = {kKeepSelective};
  problem.offload_permille = {500};
  ASSERT_OK_AND_ASSIGN(const Plan plan, MakePlan(problem));
  EXPECT_THAT(plan.keep, Each(kKeepSelective));
  EXPECT_EQ(plan.keep.size(), 36u);
  EXPECT_THAT(plan.offload_permille, Each(500));
  problem.keep.assign(36, kKeepAll);
  problem.offload_permille = {0};
  EXPECT_THAT(MakePlan(problem),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("tuning.keep"), HasSubstr("36 layers"),
                             HasSubstr("60.00 GiB may be used"))));
}

TEST(KeepPlanTest, ChoicesThatNameNoPlanAreRefused) {
  const auto refused = [](Problem problem, const std::string& text) {
    EXPECT_THAT(MakePlan(problem),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
  };
  Problem problem = LargeProblem();
  problem.keep = {0, 0};
  refused(problem, "tuning.keep = 2 values: the model has 36 layers");
  problem = LargeProblem();
  problem.offload_permille = {1, 2, 3};
  refused(problem, "tuning.offload = 3 values: the model has 36 layers");
  problem.offload_permille = {1001};
  refused(problem, "tuning.offload");
  problem = LargeProblem();
  problem.keep = {0};
  problem.kept_layers = 3;
  refused(problem, "tuning.kept_layers = 3: tuning.keep says");
}

}  // namespace
}  // namespace slidedp::policy
