#include "hostd/ctl/progress.h"

#include <cmath>
#include <sstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hostd/ctl/table.h"
#include "tests/unit/hostd_ctl/fake_daemon.h"

namespace slidedp::ctl {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kSecond = 1'000'000'000;

TEST(ProgressTest, PlainLinesAreTheFirstThenOneIn30SecondsAndTheLast) {
  std::ostringstream err;
  Progress progress(/*terminal=*/false, 80, err);
  progress.OnInfo(MakeInfo(v1::RUNNING), 0);
  for (uint64_t step = 1; step <= 9; ++step) {
    progress.OnStep(StepReply(step, 2).step(),
                    static_cast<int64_t>(step) * 10 * kSecond);
  }
  progress.Finish();
  std::string text = err.str();
  for (const char* shown :
       {"step 1/10", "step 4/10", "step 7/10", "step 9/10"}) {
    EXPECT_THAT(text, HasSubstr(shown));
  }
  for (const char* hidden :
       {"step 2/10", "step 3/10", "step 5/10", "step 8/10"}) {
    EXPECT_THAT(text, Not(HasSubstr(hidden)));
  }
}

TEST(ProgressTest, AStateChangeLeavesTheLastStepVisibleBeforeIt) {
  std::ostringstream err;
  Progress progress(false, 80, err);
  progress.OnInfo(MakeInfo(v1::RUNNING), 0);
  progress.OnStep(StepReply(1, 2).step(), kSecond);
  progress.OnStep(StepReply(2, 2).step(), 2 * kSecond);
  progress.OnInfo(MakeInfo(v1::FAILED), 3 * kSecond);
  progress.Finish();
  std::string text = err.str();
  EXPECT_LT(text.find("step 2/10"), text.find("is FAILED"));
  EXPECT_EQ(text.find("step 2/10", text.find("is FAILED")), std::string::npos);
}

TEST(ProgressTest, LoadingIsShownNowAndThen) {
  v1::JobInfo info = MakeInfo(v1::CONFIGURING);
  info.set_reason("loading weights and data");
  std::ostringstream plain, bar;
  for (bool terminal : {false, true}) {
    std::ostringstream& err = terminal ? bar : plain;
    Progress progress(terminal, 80, err);
    progress.OnInfo(info, kSecond);
    info.set_load_bytes(uint64_t{16} << 30);
    for (uint64_t gib : {2, 3, 4}) {
      info.set_loaded_bytes(gib << 30);
      progress.OnInfo(info, static_cast<int64_t>(gib) * kSecond);
    }
    progress.OnInfo(MakeInfo(v1::RUNNING), 5 * kSecond);
  }
  EXPECT_THAT(plain.str(), AllOf(HasSubstr("loading 2.00 GiB of 16.00 GiB\n"),
                                 Not(HasSubstr("3.00 GiB"))));
  EXPECT_THAT(bar.str(), AllOf(HasSubstr("\rloading 4.00 GiB of 16.00 GiB ["),
                               HasSubstr("\r\x1b[Kjob 7 is RUNNING")));
}

TEST(ProgressTest, SavingIsShownBesideTheSteps) {
  v1::JobInfo info = MakeInfo(v1::RUNNING);
  std::ostringstream err;
  Progress progress(/*terminal=*/true, 100, err);
  progress.OnInfo(info, kSecond);
  progress.OnStep(StepReply(5, 2.5).step(), 2 * kSecond);
  info.mutable_progress()->set_checkpointing(true);
  info.set_load_bytes(200);
  info.set_loaded_bytes(34);
  progress.OnInfo(info, 3 * kSecond);
  EXPECT_THAT(err.str(), HasSubstr("  saving 17 %\x1b[K"));
  progress.OnStep(StepReply(6, 2.5).step(), 4 * kSecond);
  EXPECT_THAT(err.str(), HasSubstr("step 6/"));
  info.mutable_progress()->set_checkpointing(false);
  info.set_load_bytes(0);
  progress.OnInfo(info, 5 * kSecond);
  err.str("");
  progress.OnStep(StepReply(7, 2.5).step(), 6 * kSecond);
  EXPECT_THAT(err.str(), Not(HasSubstr("saving")));
}

TEST(ProgressTest, AnUnchangedStateIsSaidOnce) {
  std::ostringstream err;
  Progress progress(false, 80, err);
  progress.OnInfo(MakeInfo(v1::RUNNING), 0);
  progress.OnInfo(MakeInfo(v1::RUNNING, 4), kSecond);
  EXPECT_EQ(err.str(), "job 7 is RUNNING\n");
}

TEST(ProgressTest, SkippedStepsAreAlwaysShown) {
  std::ostringstream err;
  Progress progress(false, 80, err);
  progress.OnInfo(MakeInfo(v1::RUNNING), 0);
  progress.OnStep(StepReply(1, 2).step(), kSecond);
  v1::StepRecord skipped = StepReply(2, std::nan("")).step();
  skipped.set_skipped(true);
  skipped.set_skip_reason("non-finite gradient norm");
  progress.OnStep(skipped, kSecond + 1);
  EXPECT_THAT(err.str(), HasSubstr("skipped: non-finite gradient norm"));
}

TEST(ProgressTest, ABarFitsItsTerminal) {
  for (int columns = 1; columns <= 200; ++columns) {
    for (uint64_t step : {0, 1, 9, 10, 11}) {
      std::string line = Progress::Line(StepReply(step, 2.5).step(), 10, 1.5,
                                        123456, /*bar=*/true, columns);
      EXPECT_LT(line.size(), static_cast<size_t>(columns)) << line;
    }
  }
  EXPECT_THAT(Progress::Line(StepReply(5, 2.5).step(), 10, 60, 100, true, 100),
              AllOf(HasSubstr("[====="), HasSubstr(">"),
                    HasSubstr("loss 2.5000"), HasSubstr("ETA 5m00s")));
}

TEST(ProgressTest, NothingWasFollowedNothingIsShown) {
  std::ostringstream err;
  Progress progress(true, 80, err);
  progress.Finish();
  EXPECT_EQ(err.str(), "");
}

TEST(TableTest, ColumnsAlignWhateverTheirTexts) {
  Table table({{"A"}, {"NUMBER", Align::kRight}, {"REST"}});
  table.Add({{"日本"}, {"1"}, {"x"}});
  table.Add({{"long text"}, {"12345678"}, {""}});
  std::ostringstream out;
  table.Print(true, false, out);
  EXPECT_EQ(out.str(),
            "A            NUMBER  REST\n"
            "日本                1  x\n"
            "long text  12345678  \n");
}

TEST(TableTest, EtaNeedsARateAndARunningJob) {
  v1::JobInfo info = MakeInfo(v1::RUNNING, 4);
  EXPECT_EQ(EtaText(info), "12.0s");
  info.set_steps_per_second(0);
  EXPECT_EQ(EtaText(info), "-");
  info.set_steps_per_second(std::nan(""));
  EXPECT_EQ(EtaText(info), "-");
  EXPECT_EQ(EtaText(MakeInfo(v1::COMPLETED, 10)), "-");
}

}  // namespace
}  // namespace slidedp::ctl
