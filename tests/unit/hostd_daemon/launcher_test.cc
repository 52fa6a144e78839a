#include "hostd/launch/launcher.h"

#include <poll.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <condition_variable>
#include <map>
#include <mutex>

#include "common/base/fd.h"
#include "hostd/server/identity.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"

namespace slidedp::hostd {
namespace {

using ::slidedp::testing::ReadWhole;
using ::slidedp::testing::StatusIs;
using ::slidedp::testing::TempFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;

class LauncherTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Launcher::Events events;
    events.launched = [this](WorkerId id, const absl::StatusOr<Launched>& l) {
      std::lock_guard lock(mutex_);
      launched_.emplace(id, l);
      changed_.notify_all();
    };
    events.exited = [this](WorkerId id, const WorkerExit& exit) {
      std::lock_guard lock(mutex_);
      exits_.emplace(id, exit);
      changed_.notify_all();
    };
    events.output = [this](WorkerId id) {
      std::lock_guard lock(mutex_);
      ++outputs_;
      changed_.notify_all();
    };
    ASSERT_OK_AND_ASSIGN(launcher_, Launcher::Start(std::move(events)));
  }

  void Launch(WorkerId id, const std::string& script,
              uint64_t log_max_bytes = 1 << 20) {
    LaunchRequest request;
    request.id = id;
    request.argv = {"/bin/sh", "-c", script};
    request.environment = {"PATH=/usr/bin:/bin", "COLOUR=blue"};
    request.uid = geteuid();
    request.gid = getegid();
    request.log_file = Log(id);
    request.log_max_bytes = log_max_bytes;
    launcher_->Launch(std::move(request));
  }
  std::string Log(WorkerId id) const {
    return folder_.Sub(std::to_string(id.job) + "-" + std::to_string(id.rank));
  }
  absl::StatusOr<Launched> AwaitLaunch(WorkerId id) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return launched_.contains(id); });
    return launched_.at(id);
  }
  WorkerExit AwaitExit(WorkerId id) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return exits_.contains(id); });
    return exits_.at(id);
  }
  void AwaitOutput() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return outputs_ > 0; });
    outputs_ = 0;
  }

  TempFolder folder_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<WorkerId, absl::StatusOr<Launched>> launched_;
  std::map<WorkerId, WorkerExit> exits_;
  int outputs_ = 0;
  std::unique_ptr<Launcher> launcher_;
};

TEST_F(LauncherTest, ChildHasTheSurroundingsAskedForAndNoOthers) {
  setenv("SECRET_OF_THE_DAEMON", "1", 1);
  umask(077);
  Launch(
      {1, 0},
      "echo colour=$COLOUR secret=$SECRET_OF_THE_DAEMON; pwd; umask; "
      "ls /proc/self/fd | wc -l; read x || echo no input; "
      "cat /proc/self/oom_score_adj; ps -o pgid= -p $$ | tr -d ' '; echo $$; "
      "trap");
  EXPECT_OK(AwaitLaunch({1, 0}));
  WorkerExit exit = AwaitExit({1, 0});
  EXPECT_EQ(exit.code, 0);
  EXPECT_EQ(exit.signal, 0);
  const std::string log = ReadWhole(Log({1, 0}));
  // ls itself has one for the folder.
  EXPECT_THAT(log,
              HasSubstr("colour=blue secret=\n/\n0022\n4\nno input\n500\n"));
  std::string pid = std::to_string(launched_.at({1, 0})->pid);
  EXPECT_THAT(log, HasSubstr("\n" + pid + "\n" + pid + "\n"));
  umask(022);
}

TEST_F(LauncherTest, ExitsAreDescribed) {
  Launch({1, 0}, "exit 7");
  Launch({1, 1}, "kill -SEGV $$");
  EXPECT_EQ(Describe(AwaitExit({1, 0})), "exited with code 7");
  EXPECT_EQ(Describe(AwaitExit({1, 1})), "was killed by signal 11 (SIGSEGV)");
}

TEST_F(LauncherTest, SignalReachesTheWholeJobAndNoOther) {
  Launch({1, 0}, "echo up; sleep 1000");
  Launch({1, 1}, "sleep 1000 & wait");
  Launch({2, 0}, "sleep 1000");
  ASSERT_OK(AwaitLaunch({1, 0}));
  ASSERT_OK(AwaitLaunch({1, 1}));
  ASSERT_OK_AND_ASSIGN(Launched other, AwaitLaunch({2, 0}));
  launcher_->Signal(1, SIGTERM);
  EXPECT_EQ(AwaitExit({1, 0}).signal, SIGTERM);
  EXPECT_EQ(AwaitExit({1, 1}).signal, SIGTERM);
  EXPECT_EQ(kill(other.pid, 0), 0);
  launcher_->Signal(2, SIGKILL);
  EXPECT_EQ(AwaitExit({2, 0}).signal, SIGKILL);
  launcher_->Signal(99, SIGKILL);
}

TEST_F(LauncherTest, SignalFindsALaunchThatIsUnderWay) {
  Launch({1, 0}, "sleep 1000");
  launcher_->Signal(1, SIGKILL);
  EXPECT_EQ(AwaitExit({1, 0}).signal, SIGKILL);
}

TEST_F(LauncherTest, GroupDiesWithItsLeader) {
  Launch({1, 0}, "sleep 1000 & echo $!; exit 0");
  EXPECT_EQ(AwaitExit({1, 0}).code, 0);
  const pid_t orphan = std::stoi(ReadWhole(Log({1, 0})));
  // Signalled before the exit was told; not gone, perhaps, before we look.
  UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, orphan, 0)));
  if (!pidfd.valid()) return;
  pollfd gone = {pidfd.get(), POLLIN, 0};
  EXPECT_EQ(poll(&gone, 1, 60'000), 1);
}

TEST_F(LauncherTest, ErrorsBeforeExecAreToldWithTheirStep) {
  LaunchRequest request;
  request.id = {1, 0};
  request.argv = {folder_.Sub("no-such-worker")};
  request.log_file = Log({1, 0});
  request.log_max_bytes = 4096;
  launcher_->Launch(request);
  EXPECT_THAT(AwaitLaunch({1, 0}),
              StatusIs(absl::StatusCode::kNotFound,
                       AllOf(HasSubstr("no-such-worker"), HasSubstr("execute"),
                             HasSubstr("No such file"))));
  request.id = {1, 1};
  request.argv = {"/bin/sh"};
  request.log_file = folder_.Sub("no-folder/log");
  launcher_->Launch(request);
  EXPECT_THAT(AwaitLaunch({1, 1}), StatusIs(absl::StatusCode::kNotFound,
                                            HasSubstr("no-folder/log")));
}

TEST_F(LauncherTest, RootBecomesTheUser) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root";
  ASSERT_OK_AND_ASSIGN(User user, UserOf(1));
  LaunchRequest request;
  request.id = {1, 0};
  request.argv = {"/bin/sh", "-c",
                  "id -u; id -g; id -G; grep -E '^Cap(Prm|Eff)' "
                  "/proc/self/status"};
  request.environment = {"PATH=/usr/bin:/bin"};
  request.uid = user.uid;
  request.gid = user.gid;
  request.groups = user.groups;
  request.log_file = Log({1, 0});
  request.log_max_bytes = 4096;
  launcher_->Launch(request);
  ASSERT_EQ(AwaitExit({1, 0}).code, 0);
  const std::string log = ReadWhole(Log({1, 0}));
  EXPECT_THAT(log, ::testing::StartsWith("1\n1\n1\n"));
  EXPECT_THAT(log, AllOf(HasSubstr("CapPrm:\t0000000000000000"),
                         HasSubstr("CapEff:\t0000000000000000")));
}

TEST_F(LauncherTest, LogIsCutOffAndTheWorkerGoesOn) {
  Launch({1, 0}, "head -c 1000000 /dev/zero | tr '\\0' x; exit 5", 10'000);
  EXPECT_EQ(AwaitExit({1, 0}).code, 5);
  const std::string log = ReadWhole(Log({1, 0}));
  EXPECT_EQ(log.substr(0, 10'000), std::string(10'000, 'x'));
  EXPECT_LT(log.size(), 10'200);
  EXPECT_THAT(log, HasSubstr("limit of 10000 bytes"));
  struct stat info;
  ASSERT_EQ(stat(Log({1, 0}).c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600);
}

TEST_F(LauncherTest, StopKillsAndReapsWhatIsLeft) {
  Launch({1, 0}, "trap '' TERM; echo up; while :; do sleep 1000; done");
  ASSERT_OK_AND_ASSIGN(Launched left, AwaitLaunch({1, 0}));
  launcher_->Stop();
  EXPECT_NE(kill(left.pid, 0), 0);
  EXPECT_FALSE(exits_.contains({1, 0}));
}

TEST_F(LauncherTest, LeftoverIsKilledOnlyIfItIsTheSameProcess) {
  Launch({1, 0}, "sleep 1000");
  ASSERT_OK_AND_ASSIGN(Launched process, AwaitLaunch({1, 0}));
  EXPECT_EQ(*StartTicks(process.pid), process.start_ticks);
  EXPECT_FALSE(KillLeftover(process.pid, process.start_ticks + 1));
  EXPECT_TRUE(KillLeftover(process.pid, process.start_ticks));
  EXPECT_EQ(AwaitExit({1, 0}).signal, SIGKILL);
  EXPECT_FALSE(KillLeftover(process.pid, process.start_ticks));
  EXPECT_FALSE(StartTicks(process.pid).ok());
}

TEST(BootIdTest, IsStable) {
  ASSERT_OK_AND_ASSIGN(std::string id, BootId());
  EXPECT_EQ(id.size(), 36);
  EXPECT_EQ(*BootId(), id);
}

}  // namespace
}  // namespace slidedp::hostd
