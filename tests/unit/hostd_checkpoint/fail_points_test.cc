// Every call that changes the disk while a checkpoint is made and old ones are
// removed: it fails, or the process dies there. Never is a visible checkpoint
// incomplete, never is there none, and the next attempt succeeds.
#include <sys/wait.h>

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/unit/hostd_checkpoint/state_fixture.h"

namespace slidedp::hostd {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr int kKilled = 77;

// The k-th call (from 0) fails with `error`, or ends the process.
class FailAt : public DiskCalls {
 public:
  FailAt(int k, int error) : k_(k), error_(error) {}
  int calls() const { return calls_; }

 private:
  int Before(const char*, const std::string&) override {
    if (calls_++ != k_) return 0;
    if (error_ == 0) _exit(kKilled);
    return error_;
  }
  const int k_, error_;
  int calls_ = 0;
};

class FailPointsTest : public StateTest {
 protected:
  FailPointsTest() : StateTest(testing::TempFolder::MemoryFolder()) {}
  void SetUp() override {
    testing::TinyModelOptions options;
    options.layers = 1;
    options.hidden = 32;
    options.vocab = 64;
    MakeModel(options);
  }
  // Two good ones, of other values than the next.
  void Begin() {
    std::filesystem::remove_all(Checkpoints());
    for (uint64_t step : {10, 20}) {
      Train(static_cast<uint32_t>(step));
      ASSERT_OK(Save(step));
      bytes_[step] = BytesOf(*state_);
    }
    Train(30);
    bytes_[30] = BytesOf(*state_);
  }
  // All that can be seen is whole, and the newest before is there.
  void ExpectGood(const std::string& where) {
    const auto found = checkpoint::List(Checkpoints());
    ASSERT_OK(found);
    std::set<uint64_t> steps;
    for (const checkpoint::Found& each : *found) {
      steps.insert(each.step);
      HostState& other = Other();
      ASSERT_OK(Load(each.path, other)) << where;
      EXPECT_TRUE(BytesOf(other) == bytes_[each.step]) << where;
    }
    EXPECT_TRUE(steps.contains(20)) << where;
    // What is visible is listed.
    for (const auto& entry :
         std::filesystem::directory_iterator(Checkpoints())) {
      const std::string name = entry.path().filename();
      EXPECT_TRUE(absl::StartsWith(name, ".") ||
                  steps.contains(std::stoull(name.substr(5))))
          << where << ": " << name;
    }
  }
  void ExpectNextSucceeds(const std::string& where) {
    const bool made = std::filesystem::exists(PathOf(30));
    if (!made) {
      ASSERT_OK(Save(30)) << where;
    }
    ASSERT_OK(checkpoint::Prune(Checkpoints(), 2));
    std::set<std::string> names;
    for (const auto& entry :
         std::filesystem::directory_iterator(Checkpoints())) {
      names.insert(entry.path().filename());
    }
    EXPECT_EQ(names, (std::set<std::string>{"step-00000020", "step-00000030"}))
        << where;
    HostState& other = Other();
    ASSERT_OK(Load(PathOf(30), other)) << where;
    EXPECT_TRUE(BytesOf(other) == bytes_[30]) << where;
  }

  std::map<uint64_t, std::string> bytes_;
};

TEST_F(FailPointsTest, AFullOrBrokenDiskAtEachCall) {
  int k = 0;
  for (bool reached = true; reached; ++k) {
    for (int error : {ENOSPC, EIO}) {
      Begin();
      FailAt calls(k, error);
      const absl::Status status = Save(30, calls);
      reached = calls.calls() > k;
      EXPECT_EQ(status.ok(), !reached) << k;
      const std::string where =
          absl::StrCat("call ", k, ": ", std::string(status.message()));
      if (reached) {
        EXPECT_THAT(std::string(status.message()),
                    HasSubstr(error == EIO ? "Input/output error"
                                           : "No space left on device"));
      }
      ExpectGood(where);
      ExpectNextSucceeds(where);
    }
  }
  // Folder, files, sizes, writes, syncs, manifest, renames, removal.
  EXPECT_GT(k, 30);
}

TEST_F(FailPointsTest, AKillAtEachCall) {
  int k = 0;
  for (bool reached = true; reached; ++k) {
    Begin();
    const pid_t child = fork();
    if (child == 0) {
      FailAt calls(k, 0);
      _exit(Save(30, calls).ok() ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status));
    ASSERT_THAT(WEXITSTATUS(status), AnyOf(0, kKilled)) << k;
    reached = WEXITSTATUS(status) == kKilled;
    const std::string where = absl::StrCat("killed at call ", k);
    ExpectGood(where);
    ExpectNextSucceeds(where);
  }
  EXPECT_GT(k, 30);
}

}  // namespace
}  // namespace slidedp::hostd
