// slidedpctl plan, and what --plan does elsewhere.
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/temp_folder.h"
#include "tests/testing/tiny_model.h"
#include "tests/unit/hostd_ctl/run_ctl.h"

namespace slidedp::ctl {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class PlanVerbTest : public ::testing::Test {
 protected:
  PlanVerbTest() {
    runner_.environment.current_folder = folder_.path();
    testing::WriteTinyModel(folder_.Sub("model"), {});
    testing::TokenDatasetOptions data;
    data.tokens = 4096;
    testing::WriteTokenDataset(folder_.Sub("data.safetensors"), data);
    folder_.Write("job.yaml",
                  "model: model\ndata: data.safetensors\noutput: out\n"
                  "sequence_length: 64\ntuning: {keep: selective, offload: "
                  "0.3}\nroutes: {reduce: bf16}\nranks: 2\n");
  }

  testing::TempFolder folder_;
  CtlRunner runner_;
};

TEST_F(PlanVerbTest, APrintedPlanGivesTheSamePlan) {
  const Outcome printed = runner_.Run({"plan", "job.yaml"});
  ASSERT_EQ(printed.code, kExitOk) << printed.err;
  EXPECT_THAT(printed.out,
              AllOf(HasSubstr("{keep: selective, offload: 0.3}"),
                    HasSubstr("reduce: bf16"), HasSubstr("2 ranks")));
  folder_.Write("plan.yaml", printed.out);
  const Outcome json = runner_.Run({"plan", "job.yaml", "-o", "json"});
  folder_.Write("plan.json", json.out);
  const std::string wanted =
      runner_.Run({"estimate", "job.yaml", "-o", "json"}).json()["plan"].dump();
  for (const char* file : {"plan.yaml", "plan.json"}) {
    const Outcome again =
        runner_.Run({"estimate", "model", "--sequence-length", "64", "--ranks",
                     "2", "--plan", file, "-o", "json"});
    ASSERT_EQ(again.code, kExitOk) << again.err;
    EXPECT_EQ(again.json()["plan"].dump(), wanted);
  }
}

TEST_F(PlanVerbTest, SubmitTakesAPlanAndSaysWhatIsWrongWithIt) {
  folder_.Write("plan.yaml", "stage_slots: 4\nupdate_threads: 3\n");
  Outcome outcome = runner_.Run(
      {"submit", "job.yaml", "--plan", "plan.yaml", "--dry-run", "-o", "json"});
  ASSERT_EQ(outcome.code, kExitOk) << outcome.err;
  EXPECT_EQ(outcome.json()["plan"]["stage_slots"], 4);
  EXPECT_EQ(outcome.json()["plan"]["update_threads"], 3);
  EXPECT_EQ(outcome.json()["spec"]["plan"], folder_.Sub("plan.yaml"));
  folder_.Write("plan.yaml", "layers: {0-100: {keep: full}}\n");
  for (const char* verb : {"submit", "plan", "estimate"}) {
    outcome = runner_.Run({verb, "job.yaml", "--plan", "plan.yaml"});
    EXPECT_EQ(outcome.code, kExitFailure);
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr("plan.yaml"), HasSubstr("layers")));
  }
  outcome = runner_.Run({"plan", "model", "--plan", "absent.yaml"});
  EXPECT_EQ(outcome.code, kExitFailure);
  EXPECT_THAT(outcome.err, HasSubstr("absent.yaml"));
}

TEST_F(PlanVerbTest, WhatAGpuCannotHoldIsPlannedIntoHostMemory) {
  const auto pinned = [&](const char* share) {
    const Outcome outcome =
        runner_.Run({"estimate", "model", "--gpu-memory", "24", "--batch-size",
                     "4", "--keep", "full", "--offload", share, "-o", "json"});
    EXPECT_EQ(outcome.code, kExitOk) << outcome.err;
    const Json json = outcome.json();
    const Json& buffers = json["device_buffers_per_rank"];
    uint64_t bytes = 0;
    for (const auto& [name, value] : buffers.items()) {
      if (name.rfind("pinned.", 0) == 0) bytes += value.get<uint64_t>();
    }
    EXPECT_EQ(json["pinned_bytes_per_rank"], bytes);
    return bytes;
  };
  EXPECT_LT(pinned("0"), pinned("0.5"));
  EXPECT_LT(pinned("0.5"), pinned("1"));
}

}  // namespace
}  // namespace slidedp::ctl
