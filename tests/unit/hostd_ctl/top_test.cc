// slidedpctl top against a daemon with scripted answers.
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/unit/hostd_ctl/fake_daemon.h"
#include "tests/unit/hostd_ctl/run_ctl.h"

namespace slidedp::ctl {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class TopTest : public ::testing::Test {
 protected:
  TopTest() { runner_.environment.socket = daemon_.socket(); }

  FakeDaemon daemon_;
  CtlRunner runner_;
};

TEST_F(TopTest, ShowsOnceWhatJobsDo) {
  {
    std::lock_guard<std::mutex> lock(daemon_.mutex);
    daemon_.job.set_mfu(0.414);
    daemon_.job.set_eval_loss(2.25);
    daemon_.job.set_device_peak_bytes(uint64_t{5} << 30);
  }
  Outcome outcome = runner_.Run({"top"});
  EXPECT_EQ(outcome.code, kExitOk);
  EXPECT_THAT(outcome.out,
              AllOf(HasSubstr("3/10"), HasSubstr("2.5000"), HasSubstr("2.2500"),
                    HasSubstr("512"), HasSubstr("41.4%"), HasSubstr("5.00 GiB"),
                    HasSubstr("14.0s")));
  EXPECT_THAT(outcome.out, Not(HasSubstr("\x1b")));
  outcome = runner_.Run({"top", "-o", "json"});
  EXPECT_EQ(outcome.json()["jobs"][0]["eval_loss"], 2.25);
  EXPECT_EQ(outcome.json()["jobs"][0]["mfu"], 0.414);
}

TEST_F(TopTest, OnATerminalGoesOnUntilCtrlC) {
  runner_.environment.out_is_terminal = true;
  std::thread presser([this] {
    while (!runner_.interrupt.armed()) std::this_thread::yield();
    runner_.interrupt.Raise();
  });
  Outcome outcome = runner_.Run({"top"});
  presser.join();
  EXPECT_EQ(outcome.code, kExitOk);
  EXPECT_THAT(outcome.out, HasSubstr("1 job"));
}

}  // namespace
}  // namespace slidedp::ctl
