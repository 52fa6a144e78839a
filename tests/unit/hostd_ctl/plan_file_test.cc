#include "hostd/ctl/plan_file.h"

#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hostd/ctl/job_file.h"
#include "policy/wire.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/tiny_model.h"

namespace slidedp::ctl {
namespace {

using ::slidedp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kLayers = 12;

model::ModelConfig Config() {
  testing::TinyModelOptions options;
  options.layers = kLayers;
  return testing::TinyConfig(options);
}

v1::JobSpec Spec() {
  v1::JobSpec spec = DefaultJobSpec();
  spec.set_ranks(2);
  spec.set_sequence_length(32);
  return spec;
}

absl::StatusOr<policy::Plan> PlanOf(const v1::JobSpec& spec) {
  auto problem = policy::ProblemOf(spec, Config(), policy::DeviceKind::kCpu,
                                   /*peer_access=*/true, /*logical_cpus=*/4);
  if (!problem.ok()) return problem.status();
  return policy::MakePlan(*problem);
}

absl::Status Read(absl::string_view text, v1::JobSpec spec = Spec()) {
  return ReadPlanFile(text, "plan.yaml", kLayers, spec);
}

TEST(PlanFileTest, PrintedPlansReadBackAsTheyAre) {
  std::mt19937 random(1);
  for (int i = 0; i < 20; ++i) {
    v1::JobSpec spec = Spec();
    v1::Tuning& tuning = *spec.mutable_tuning();
    for (int l = 0; l < kLayers; ++l) {
      const uint8_t masks[] = {0, policy::kKeepSelective, policy::kKeepAll,
                               static_cast<uint8_t>(random() % 128)};
      tuning.mutable_keep()->push_back(static_cast<char>(masks[random() % 4]));
      tuning.add_offload_permille(random() % 2 * (random() % 1001));
    }
    tuning.set_window_slots(1 + random() % 5);
    tuning.set_stage_slots(1 + random() % 5);
    tuning.mutable_head_routes()->set_grads(v1::GRAD_ROUTE_CPU);
    tuning.mutable_decoder_routes()->set_reduce(v1::REDUCE_DTYPE_BF16);
    ASSERT_OK_AND_ASSIGN(const policy::Plan plan, PlanOf(spec));
    std::ostringstream yaml;
    PrintPlanFile(plan, "a plan", yaml);
    for (const std::string& text : {yaml.str(), ToText(JsonPlanFile(plan))}) {
      SCOPED_TRACE(text);
      v1::JobSpec back = Spec();
      ASSERT_OK(ReadPlanFile(text, "plan.yaml", kLayers, back));
      ASSERT_OK_AND_ASSIGN(const policy::Plan again, PlanOf(back));
      EXPECT_EQ(policy::PlanHash(again), policy::PlanHash(plan));
      EXPECT_EQ(again.compute_threads, plan.compute_threads);
      EXPECT_EQ(again.update_threads, plan.update_threads);
    }
  }
}

TEST(PlanFileTest, RangesNamesAndListsSayWhatLayersKeep) {
  v1::JobSpec spec = Spec();
  ASSERT_OK(
      ReadPlanFile("layers:\n"
                   "  0-8: {keep: none, offload: 1}\n"
                   "  9: {keep: [qkv, attention], offload: 0.25}\n"
                   "  10: {keep: selective}\n"
                   "  11: {keep: full}\n",
                   "plan.yaml", kLayers, spec));
  ASSERT_OK_AND_ASSIGN(const policy::Plan plan, PlanOf(spec));
  EXPECT_EQ(plan.keep[8], 0);
  EXPECT_EQ(plan.offload_permille[8], 1000);
  EXPECT_EQ(plan.keep[9], policy::Bit(policy::Segment::kQkv) |
                              policy::Bit(policy::Segment::kAttention));
  EXPECT_EQ(plan.offload_permille[9], 250);
  EXPECT_EQ(plan.keep[10], policy::kKeepSelective);
  EXPECT_EQ(plan.offload_permille[10], 0);
  EXPECT_EQ(plan.keep[11], policy::kKeepAll);
}

TEST(PlanFileTest, WhatTheJobChoosesComesFirst) {
  v1::JobSpec spec = Spec();
  spec.mutable_tuning()->set_window_slots(7);
  spec.mutable_routes()->set_params(v1::PARAM_ROUTE_FULL);
  ASSERT_OK(
      ReadPlanFile("window_slots: 3\ngrad_slots: 3\n"
                   "routes: {head: {params: sharded, grads: cpu}}\n",
                   "plan.yaml", kLayers, spec));
  EXPECT_EQ(spec.tuning().window_slots(), 7u);
  EXPECT_EQ(spec.tuning().grad_slots(), 3u);
  ASSERT_OK_AND_ASSIGN(const policy::Plan plan, PlanOf(spec));
  EXPECT_EQ(plan.head.params, policy::ParamRoute::kFull);
  EXPECT_EQ(plan.head.grads, policy::GradRoute::kCpu);
}

TEST(PlanFileTest, MistakesAreNamedWithFileFieldValueAndRemedy) {
  struct Case {
    std::string text;
    std::vector<std::string> parts;
  };
  for (const Case& c : std::vector<Case>{
           {"7", {"plan.yaml", "not a plan file"}},
           {"window_slot: 3", {"window_slot (line 1)", "mean window_slots?"}},
           {"window_slots: many", {"window_slots (line 1) = many"}},
           {"stage_slots: 5000", {"stage_slots (line 1) = 5000"}},
           {"routes: full", {"routes (line 1) = full"}},
           {"routes: {body: {}}", {"routes.body", "unknown key"}},
           {"routes: {head: {params: half}}",
            {"routes.head.params (line 1) = half", "sharded"}},
           {"routes: {head: {param: full}}",
            {"routes.head.param", "mean params?"}},
           {"layers: full", {"layers (line 1) = full"}},
           {"layers: {0-10: {}}", {"layer 11"}},
           {"layers: {0-12: {}}", {"layers.0-12", "has 12", "0-11"}},
           {"layers: {5-3: {}}", {"layers.5-3"}},
           {"layers: {-1: {}}", {"layers.-1"}},
           {"layers: {x: {}}", {"layers.x"}},
           {"layers: {0-11: full}", {"layers.0-11 (line 1) = full"}},
           {"layers:\n  0-11: {}\n  3: {}", {"layers.3 (line 3)", "line 2"}},
           {"layers: {0-11: {kep: full}}", {"layers.0-11.kep", "mean keep?"}},
           {"layers: {0-11: {keep: most}}", {"layers.0-11.keep", "= most"}},
           {"layers: {0-11: {keep: [full]}}", {"full is no segment"}},
           {"layers: {0-11: {keep: null}}", {"layers.0-11.keep"}},
           {"layers: {0-11: {offload: 2}}",
            {"layers.0-11.offload (line 1) = 2", "<= 1"}}}) {
    SCOPED_TRACE(c.text);
    const absl::Status status = Read(c.text);
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument,
                                 HasSubstr("plan.yaml")));
    for (const std::string& part : c.parts) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(part));
    }
  }
}

TEST(PlanFileTest, TwoVoicesOnWhatLayersKeepAreOneTooMany) {
  v1::JobSpec spec = Spec();
  spec.mutable_tuning()->set_kept_layers(3);
  EXPECT_THAT(Read("layers: {0-11: {keep: full}}", spec),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("layers (line 1)"),
                             HasSubstr("tuning.kept_layers"))));
}

TEST(PlanFileTest, JobFilesKeepAndOffloadAllLayersAlike) {
  ASSERT_OK_AND_ASSIGN(
      v1::JobSpec spec,
      ParseJobFile("tuning: {keep: [gate_up], offload: 0.5, stage_slots: 3}",
                   "job.yaml", {}));
  EXPECT_EQ(spec.tuning().keep(),
            std::string(1, policy::Bit(policy::Segment::kGateUp)));
  ASSERT_EQ(spec.tuning().offload_permille_size(), 1);
  EXPECT_EQ(spec.tuning().offload_permille(0), 500u);
  spec.set_sequence_length(32);
  ASSERT_OK_AND_ASSIGN(const policy::Plan plan, PlanOf(spec));
  EXPECT_THAT(
      plan.offload_permille,
      ::testing::AllOf(::testing::SizeIs(kLayers), ::testing::Each(500)));
  ASSERT_OK_AND_ASSIGN(
      spec, ParseJobFile("tuning: {keep: auto, offload: null}", "job.yaml",
                         {"tuning.offload=1", "tuning.offload=auto"}));
  EXPECT_TRUE(spec.tuning().keep().empty());
  EXPECT_EQ(spec.tuning().offload_permille_size(), 0);
}

}  // namespace
}  // namespace slidedp::ctl
