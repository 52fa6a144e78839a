// slidedpctl estimate, and what a job's data give.
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/fd.h"
#include "common/model/layout.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hostd/ctl/client.h"
#include "hostd/ctl/job_file.h"
#include "hostd/ctl/resolve.h"
#include "hostd/ctl/socket_path.h"
#include "policy/plan.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"
#include "tests/testing/tiny_model.h"
#include "tests/unit/hostd_ctl/cli_fixture.h"

namespace slidedp::ctl {
namespace {

using ::slidedp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

TEST_F(CliTest, EstimateIsThePolicysNumbersToTheByte) {
  Outcome outcome = runner_.Run({"estimate", "model", "--ranks", "2",
                                 "--batch-size", "6", "--micro-batch-size", "2",
                                 "--sequence-length", "96", "-o", "json"});
  ASSERT_EQ(outcome.code, kExitOk) << outcome.err;
  Json json = outcome.json();

  policy::Problem problem;
  problem.config = testing::TinyConfig(model_options_);
  problem.ranks = 2;
  problem.logical_cpus = 2;
  problem.sequence_length = 96;
  problem.batch_size = 6;
  problem.micro_batch_size = 2;
  model::StateLayout layout = model::MakeStateLayout(problem.config);
  ASSERT_OK_AND_ASSIGN(policy::Plan plan, policy::MakePlan(problem));
  uint64_t host = 0, device = 0;
  for (const policy::NamedBytes& part : policy::HostSegments(layout, plan)) {
    EXPECT_EQ(json["host_segments"][part.name], part.bytes) << part.name;
    host += part.bytes;
  }
  for (const policy::NamedBytes& part :
       policy::DeviceBuffers(problem.config, layout, plan)) {
    EXPECT_EQ(json["device_buffers_per_rank"][part.name], part.bytes)
        << part.name;
    device += part.bytes;
  }
  EXPECT_EQ(json["host_bytes"], host);
  EXPECT_EQ(json["device_bytes_per_rank"], device);
  EXPECT_EQ(json["host_bytes_with_cpu_ranks"], host + 2 * device);
  EXPECT_EQ(json["parameters"], layout.parameters);
  EXPECT_EQ(json["host_segments"].size(),
            policy::HostSegments(layout, plan).size());

  outcome =
      runner_.Run({"estimate", "model", "--ranks", "2", "--batch-size", "6",
                   "--micro-batch-size", "2", "--sequence-length", "96"});
  EXPECT_THAT(outcome.out, AllOf(HasSubstr(absl::StrCat(host)),
                                 HasSubstr(absl::StrCat(device))));
}

TEST_F(CliTest, EstimateWithDataSaysWhatAStepHolds) {
  // 16 documents, 4096 tokens.
  for (const bool packing : {false, true}) {
    Outcome outcome =
        runner_.Run({"estimate", "model", "--data", "data.safetensors",
                     "--packing", packing ? "true" : "false", "--batch-size",
                     "4", "--sequence-length", "300", "-o", "json"});
    ASSERT_EQ(outcome.code, kExitOk) << outcome.err;
    const Json json = outcome.json();
    const double padding = json["data"]["padding_share"].get<double>();
    const double tokens = json["data"]["tokens_per_step"].get<double>();
    EXPECT_NEAR(tokens, 4 * 300 * (1 - padding), 1e-6);
    const int64_t documents =
        json["plan"]["documents_per_sequence"].get<int64_t>();
    if (!packing) {
      EXPECT_EQ(padding, 0);  // a stream is cut evenly
      EXPECT_EQ(documents, 0);
      continue;
    }
    const auto sequences = json["data"]["sequences"].get<uint64_t>();
    EXPECT_GE(sequences, 14u);  // 4096 / 300
    EXPECT_NEAR(padding, 1 - 4096.0 / (static_cast<double>(sequences) * 300),
                1e-9);
    EXPECT_GT(documents, 1);
    outcome = runner_.Run({"estimate", "model", "--data", "data.safetensors",
                           "--set", "packing=true"});
    EXPECT_THAT(outcome.out,
                AllOf(HasSubstr("documents packed"), HasSubstr("% padding")));
  }
}

TEST_F(CliTest, SeveralDataSetsAndMaxTokensAreResolved) {
  testing::TokenDatasetOptions data;
  data.tokens = 640;
  data.seed = 2;
  testing::WriteTokenDataset(folder_.Sub("b.safetensors"), data);
  folder_.Write("job.yaml",
                "model: model\noutput: out\nsequence_length: 64\n"
                "data: [{path: data.safetensors, weight: 0.75},\n"
                "       {path: b.safetensors, weight: 0.25}]\n"
                "batch_size: 4\nmax_tokens: 1000\n");
  Outcome outcome =
      runner_.Run({"submit", "job.yaml", "--dry-run", "-o", "json"});
  ASSERT_EQ(outcome.code, kExitOk) << outcome.err;
  const Json json = outcome.json();
  EXPECT_EQ(json["spec"]["dataset"]["sequences"], 74);
  EXPECT_EQ(json["spec"]["data"][1]["path"], folder_.Sub("b.safetensors"));
  EXPECT_EQ(json["spec"]["data"][1]["weight"], 0.25);
  // 16 sequences of 64 are the fewest that hold 1000 tokens.
  EXPECT_EQ(json["spec"]["steps"], 4);
  EXPECT_EQ(json["spec"]["max_tokens"], 1000);
  EXPECT_EQ(json["data"]["sources"][0]["share"], 0.75);
  EXPECT_NEAR(json["data"]["sources"][1]["passes_per_epoch"].get<double>(),
              0.25 * 74 / 10, 1e-9);
  outcome = runner_.Run({"submit", "job.yaml", "--dry-run"});
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("25.0% of each step"),
                                 HasSubstr("1.85 passes an epoch")));
}

TEST_F(CliTest, EstimateNeedsOnlyTheConfig) {
  testing::TempFolder bare;
  bare.Write("config.json", testing::TinyConfigJson(model_options_));
  Outcome outcome =
      runner_.Run({"estimate", bare.path(), "--max-grad-norm", "null"});
  EXPECT_EQ(outcome.code, kExitOk) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("eager"));
}

TEST_F(CliTest, EstimateOfABadModelIsOneError) {
  Outcome outcome = runner_.Run({"estimate", "absent"});
  EXPECT_EQ(outcome.code, kExitFailure);
  EXPECT_THAT(outcome.err, HasSubstr("config.json"));
  testing::TempFolder bad;
  bad.Write("config.json", "{\"architectures\": [\"GPT2LMHeadModel\"]}");
  outcome = runner_.Run({"estimate", bad.path()});
  EXPECT_EQ(outcome.code, kExitFailure);
  EXPECT_THAT(outcome.err, HasSubstr("config.json"));
}

}  // namespace
}  // namespace slidedp::ctl
