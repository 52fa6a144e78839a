#include "hostd/daemon/job_state.h"

#include <set>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace slidedp::hostd {
namespace {

constexpr v1::JobState kStates[] = {
    v1::PENDING,   v1::CONFIGURING, v1::RUNNING,  v1::COMPLETING,
    v1::COMPLETED, v1::FAILED,      v1::CANCELLED};

TEST(JobStateTest, TableOfTransitions) {
  const std::set<std::pair<v1::JobState, v1::JobState>> allowed = {
      {v1::PENDING, v1::CONFIGURING},
      {v1::CONFIGURING, v1::RUNNING},
      {v1::RUNNING, v1::COMPLETING},
      {v1::COMPLETING, v1::COMPLETED},
      {v1::PENDING, v1::FAILED},
      {v1::PENDING, v1::CANCELLED},
      {v1::CONFIGURING, v1::FAILED},
      {v1::CONFIGURING, v1::CANCELLED},
      {v1::RUNNING, v1::FAILED},
      {v1::RUNNING, v1::CANCELLED},
      {v1::COMPLETING, v1::FAILED},
      {v1::COMPLETING, v1::CANCELLED},
      // For another attempt, which may find the output in place.
      {v1::CONFIGURING, v1::PENDING},
      {v1::RUNNING, v1::PENDING},
      {v1::COMPLETING, v1::PENDING},
      {v1::CONFIGURING, v1::COMPLETING}};
  for (v1::JobState from : kStates) {
    for (v1::JobState to : kStates) {
      EXPECT_EQ(MayFollow(from, to), allowed.contains({from, to}))
          << v1::JobState_Name(from) << " -> " << v1::JobState_Name(to);
    }
  }
}

TEST(JobStateTest, EveryStateIsWaitingActiveOrEnded) {
  for (v1::JobState state : kStates) {
    EXPECT_EQ((state == v1::PENDING) + IsActive(state) + HasEnded(state), 1)
        << v1::JobState_Name(state);
  }
}

TEST(JobStateTest, ActiveJobsOfAnEarlierDaemonEndAsTheyMay) {
  for (v1::JobState state : {v1::CONFIGURING, v1::RUNNING, v1::COMPLETING}) {
    Recovered failed = RecoverActive(state, false);
    EXPECT_EQ(failed.state, v1::FAILED);
    EXPECT_THAT(failed.reason, ::testing::HasSubstr("submit it again"));
    EXPECT_TRUE(MayFollow(state, failed.state));
    Recovered cancelled = RecoverActive(state, true);
    EXPECT_EQ(cancelled.state, v1::CANCELLED);
    EXPECT_FALSE(cancelled.reason.empty());
  }
  EXPECT_THAT(RecoverActive(v1::COMPLETING, false).reason,
              ::testing::HasSubstr("output"));
}

}  // namespace
}  // namespace slidedp::hostd
