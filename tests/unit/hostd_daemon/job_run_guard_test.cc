// Steps that can't be applied, and how long they are put up with.
#include <cmath>

#include "tests/unit/hostd_daemon/job_run_fixture.h"

namespace slidedp::hostd {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;

class GuardTest : public JobRunTest {
 protected:
  // One rank says so many steps whose loss is not a number.
  uint64_t TrainOnNan(uint64_t steps) {
    const uint64_t job = Join(1);
    const policy::Plan plan = Proposed(0);
    AcceptAndAttach(job);
    SDP_CHECK(PassSource().error().empty(), "source");
    AllReadyAndStart();
    const CheckedSpec checked = *CheckSpec(spec_, {2, 1});
    TrainOnNothing(*attached_[0], checked.layout, plan, 0, 0, steps,
                   std::nan(""));
    return job;
  }
  std::vector<std::string> Texts(uint64_t job) {
    std::vector<std::string> texts;
    const v1::GetReply reply = *Get(job);
    for (const v1::JobEvent& event : reply.events()) {
      texts.push_back(event.text());
    }
    return texts;
  }
};

TEST_F(GuardTest, OneMoreThanMaxSkippedStepsInARowEndsTheJob) {
  spec_.set_max_skipped_steps(1);
  const uint64_t job = TrainOnNan(2);
  const v1::JobInfo end = AwaitEnd(job);
  EXPECT_EQ(end.state(), v1::FAILED);
  EXPECT_THAT(
      end.reason(),
      AllOf(HasSubstr("step 2 was skipped: the loss of rank 0 is not "
                      "finite"),
            HasSubstr("2 steps in a row"), HasSubstr("max_skipped_steps is 1"),
            HasSubstr("learning rate")));
  EXPECT_THAT(Texts(job),
              Contains("step 1 was skipped: the loss of rank 0 is not finite"));
  Finish();
}

TEST_F(GuardTest, WithoutALimitSkippedStepsAreOnlyReported) {
  spec_.set_max_skipped_steps(0);
  const uint64_t job = TrainOnNan(3);
  v1::WorkerMessage steps_done;
  steps_done.mutable_steps_done();
  sessions_[0]->Say(steps_done);
  auto open = sessions_[0]->Next();
  ASSERT_TRUE(open && open->has_open_output());
  EXPECT_THAT(Texts(job),
              Contains("step 3 was skipped: the loss of rank 0 is not finite"));
  ASSERT_OK_AND_ASSIGN(v1::GetReply got, Get(job));
  EXPECT_TRUE(got.last_step().skipped());
  EXPECT_OK(Cancel(job, self_));
  Finish();
}

}  // namespace
}  // namespace slidedp::hostd
