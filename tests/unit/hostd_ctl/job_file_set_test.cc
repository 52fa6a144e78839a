// --set over a job file.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hostd/ctl/job_file.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/hostd_ctl/parse_job.h"

namespace slidedp::ctl {
namespace {

using ::slidedp::testing::kInvalid;
using ::slidedp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(JobFileSetTest, SetGoesOverTheFileAndIsYaml) {
  ASSERT_OK_AND_ASSIGN(
      v1::JobSpec spec,
      Parse("optimizer: {lr: 1, beta1: 0.5}\nranks: 2\n",
            {"optimizer.lr=1e-4", "ranks=4", "max_grad_norm=null",
             "schedule={kind: cosine, min_lr_ratio: 0.25}", "name='x'",
             "model=a=b"}));
  EXPECT_EQ(spec.optimizer().lr(), 1e-4);
  EXPECT_EQ(spec.optimizer().beta1(), 0.5);
  EXPECT_EQ(spec.ranks(), 4);
  EXPECT_FALSE(spec.has_max_grad_norm());
  EXPECT_EQ(spec.schedule().kind(), v1::SCHEDULE_KIND_COSINE);
  EXPECT_EQ(spec.schedule().min_lr_ratio(), 0.25);
  EXPECT_EQ(spec.name(), "x");
  EXPECT_EQ(spec.model(), "a=b");
}

TEST(JobFileSetTest, TheLastSetWins) {
  ASSERT_OK_AND_ASSIGN(v1::JobSpec spec, Parse("{}", {"ranks=2", "ranks=3"}));
  EXPECT_EQ(spec.ranks(), 3);
}

TEST(JobFileSetTest, SetOfStepsReplacesEpochsAndTheOtherWayRound) {
  ASSERT_OK_AND_ASSIGN(v1::JobSpec steps, Parse("epochs: 2\n", {"steps=5"}));
  EXPECT_EQ(steps.steps(), 5);
  EXPECT_EQ(steps.epochs(), 0);
  ASSERT_OK_AND_ASSIGN(v1::JobSpec epochs, Parse("steps: 5\n", {"epochs=2"}));
  EXPECT_EQ(epochs.steps(), 0);
  EXPECT_EQ(epochs.epochs(), 2);
}

TEST(JobFileSetTest, ABadSetSaysSo) {
  const std::pair<const char*, const char*> cases[] = {
      {"ranks", "not key=value"},
      {"=2", "not key=value"},
      {"rank=2", "did you mean ranks?"},
      {"optimizer.lr=fast", "optimizer.lr = fast"},
      {"optimizer.lr=", "optimizer.lr"},
      {"optimizer=3", "optimizer = 3"},
      {"optimizer={lr: 1, lr: 2}", "given twice"},
      {"ranks=[", "line 1"},
      {"ranks=&a 2", "anchors"},
      {"ranks=2\nseed: 3", "ranks"},
  };
  for (const auto& [text, part] : cases) {
    EXPECT_THAT(Parse("{}", {text}),
                StatusIs(kInvalid, AllOf(HasSubstr("--set"), HasSubstr(part))))
        << text;
  }
  EXPECT_OK(CheckSets({"ranks=nonsense", "optimizer={}"}));
  EXPECT_THAT(CheckSets({"ranks=2", "rnaks=2"}), StatusIs(kInvalid));
}

}  // namespace
}  // namespace slidedp::ctl
