// What a job file asks of schedules, tensors and evaluations, resolved against
// the user's files.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/temp_folder.h"
#include "tests/testing/tiny_model.h"
#include "tests/unit/hostd_ctl/run_ctl.h"

namespace slidedp::ctl {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

class TrainingKeysTest : public ::testing::Test {
 protected:
  TrainingKeysTest() {
    runner_.environment.current_folder = folder_.path();
    testing::WriteTinyModel(folder_.Sub("model"), {});
    testing::WriteTokenDataset(folder_.Sub("data.safetensors"), {});
    folder_.Write("text", "not a dataset");
  }
  Outcome DryRun(const std::string& more,
                 const std::vector<std::string>& options) {
    folder_.Write("job.yaml",
                  absl::StrCat("model: model\ndata: data.safetensors\n"
                               "output: out\nsequence_length: 64\nsteps: 10\n",
                               more));
    std::vector<std::string> args = {"submit", "job.yaml", "--dry-run"};
    args.insert(args.end(), options.begin(), options.end());
    return runner_.Run(args);
  }

  testing::TempFolder folder_;
  CtlRunner runner_;
};

TEST_F(TrainingKeysTest, RatiosAndEvaluationAreResolved) {
  const Outcome outcome = DryRun(
      "schedule: {kind: wsd, warmup_ratio: 0.25}\n"
      "freeze: [model.embed_tokens.*]\ntensorboard: runs\n"
      "eval: {data: data.safetensors, every_steps: 5, max_sequences: 9}\n",
      {"-o", "json"});
  ASSERT_EQ(outcome.code, kExitOk) << outcome.err;
  const Json spec = outcome.json()["spec"];
  EXPECT_EQ(spec["schedule"]["warmup_steps"], 3);  // 2.5, rounded up
  EXPECT_EQ(spec["schedule"]["decay_steps"], 1);
  EXPECT_EQ(spec["freeze"][0], "model.embed_tokens.*");
  EXPECT_EQ(spec["tensorboard"], folder_.Sub("runs"));
  EXPECT_EQ(spec["eval"]["data"], folder_.Sub("data.safetensors"));
  EXPECT_EQ(spec["eval"]["max_sequences"], 9);
  EXPECT_EQ(spec["eval"]["dataset"]["sequences"], 64);
  // Of 9 sequences of 64; the last position of each has no label.
  EXPECT_EQ(spec["eval"]["dataset"]["valid_tokens"], 9 * 63);
}

TEST_F(TrainingKeysTest, BadValuesAreOneErrorAndExitCodeOne) {
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"schedule.warmup_steps=2", "schedule.warmup_ratio=0.5"},
       "schedule.warmup_ratio = 0.5"},
      {{"schedule.min_lr_ratio=0.1"}, "no use with schedule.kind linear"},
      {{"schedule.decay_steps=3"}, "schedule.decay_steps = 3"},
      {{"schedule.decay=1-sqrt"}, "schedule.decay = 1-sqrt"},
      {{"schedule=wsd", "schedule.warmup_steps=10"}, "steps of decay"},
      {{"freeze=[layers.0.*]"}, "freeze = layers.0.*"},
      {{"freeze=['*']"}, "nothing to be trained"},
      {{"optimizer.no_decay=[nothing]"}, "optimizer.no_decay = nothing"},
      {{"early_stop.patience=2"}, "eval.data"},
      {{"eval.every_steps=2"}, "eval.data"},
      {{"eval.data=text"}, "eval.data"},
      {{"eval.data=data.safetensors", "early_stop.patience=2"},
       "eval.every_steps"},
  };
  for (const auto& [sets, part] : cases) {
    std::vector<std::string> options;
    for (const std::string& set : sets) {
      options.push_back("--set");
      options.push_back(set);
    }
    const Outcome outcome = DryRun("", options);
    EXPECT_EQ(outcome.code, kExitFailure) << sets[0];
    EXPECT_THAT(outcome.err, HasSubstr(part)) << sets[0];
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1)
        << outcome.err;
    EXPECT_THAT(outcome.out, IsEmpty()) << sets[0];
  }
}

}  // namespace
}  // namespace slidedp::ctl
