#include "common/base/memory.h"

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "common/base/units.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"

namespace slidedp {
namespace {

using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;

// A host made of files.
class FakeHost {
 public:
  FakeHost() {
    Write("/proc/meminfo",
          "MemTotal:       9999999 kB\nMemAvailable:    1048576 kB\n");
  }
  void Write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories(
        std::filesystem::path(folder_.path() + path).parent_path());
    folder_.Write(path.substr(1), text);
  }
  void MountV2(const std::string& root) {
    Write("/proc/self/mountinfo",
          "22 1 0:20 / /proc rw - proc proc rw\n"
          "30 22 0:26 " +
              root +
              " /cg rw,nosuid shared:4 - cgroup2 cgroup2 "
              "rw,nsdelegate\n");
  }
  void Group(const std::string& path, const std::string& limit,
             const std::string& usage, const std::string& stat = "") {
    Write(path + "/memory.max", limit + "\n");
    Write(path + "/memory.current", usage + "\n");
    Write(path + "/memory.stat", stat);
  }
  std::string root() const { return folder_.path(); }

 private:
  testing::TempFolder folder_;
};

TEST(AvailableMemoryTest, WithoutCgroupsTheHostDecides) {
  FakeHost host;
  const auto room = AvailableMemory(host.root());
  ASSERT_THAT(room, IsOk());
  EXPECT_EQ(room->bytes, kGiB);
  EXPECT_THAT(room->limit, HasSubstr("MemAvailable"));
}

TEST(AvailableMemoryTest, TheTightestAncestorDecides) {
  FakeHost host;
  host.MountV2("/");
  host.Write("/proc/self/cgroup", "0::/user/job\n");
  host.Group("/cg/user/job", "max", "5000");
  host.Group("/cg/user", absl::StrCat(300 * kMiB), absl::StrCat(100 * kMiB),
             absl::StrCat("anon 7\ninactive_file ", 30 * kMiB, "\nactive_file ",
                          20 * kMiB, "\n"));
  const auto room = AvailableMemory(host.root());
  ASSERT_THAT(room, IsOk());
  EXPECT_EQ(room->bytes, 250 * kMiB);
  EXPECT_EQ(room->limit, "memory.max of cgroup /user");
}

TEST(AvailableMemoryTest, AMountOfADeepGroupIsItsTop) {
  FakeHost host;
  host.MountV2("/box/1");
  host.Write("/proc/self/cgroup", "0::/box/1\n");
  host.Group("/cg", absl::StrCat(10 * kMiB), absl::StrCat(4 * kMiB));
  const auto room = AvailableMemory(host.root());
  ASSERT_THAT(room, IsOk());
  EXPECT_EQ(room->bytes, 6 * kMiB);
  EXPECT_EQ(room->limit, "memory.max of cgroup /");
}

TEST(AvailableMemoryTest, UsageBeyondTheLimitLeavesNothing) {
  FakeHost host;
  host.MountV2("/");
  host.Write("/proc/self/cgroup", "0::/a\n");
  host.Group("/cg/a", "100", "200");
  EXPECT_EQ(AvailableMemory(host.root())->bytes, 0u);
}

TEST(AvailableMemoryTest, VersionOneControllersCountToo) {
  FakeHost host;
  host.Write("/proc/self/mountinfo",
             "31 1 0:28 / /cg rw - tmpfs tmpfs rw\n"
             "32 31 0:29 / /cg/cpu rw - cgroup cgroup rw,cpu\n"
             "33 31 0:32 / /cg/memory rw - cgroup cgroup rw,memory\n");
  host.Write("/proc/self/cgroup", "5:cpu:/x\n4:memory:/x:y\n0::/x\n");
  host.Write("/cg/memory/x:y/memory.limit_in_bytes", "1000000\n");
  host.Write("/cg/memory/x:y/memory.usage_in_bytes", "400000\n");
  host.Write("/cg/memory/x:y/memory.stat",
             "inactive_file 1\ntotal_inactive_file 100000\n"
             "total_active_file 0\n");
  const auto room = AvailableMemory(host.root());
  ASSERT_THAT(room, IsOk());
  EXPECT_EQ(room->bytes, 700000u);
  EXPECT_THAT(room->limit, HasSubstr("limit_in_bytes of cgroup /x:y"));
}

TEST(AvailableMemoryTest, OddFilesLimitNothing) {
  FakeHost host;
  host.Write("/proc/self/mountinfo", "\n - \n1 2 3\na b c d e f - cgroup2\n");
  host.Write("/proc/self/cgroup", "::\n\n0:\n0::no-slash\n");
  EXPECT_EQ(AvailableMemory(host.root())->bytes, kGiB);
}

TEST(AvailableMemoryTest, WithoutMemAvailableThereIsNoAnswer) {
  FakeHost host;
  host.Write("/proc/meminfo", "MemAvailable:\nMemAvailableX: 3 kB\n");
  EXPECT_THAT(AvailableMemory(host.root()),
              StatusIs(absl::StatusCode::kNotFound));
}

TEST(AvailableMemoryTest, ThisHostHasSome) {
  const auto room = AvailableMemory();
  ASSERT_THAT(room, IsOk());
  EXPECT_GT(room->bytes, 0u);
}

}  // namespace
}  // namespace slidedp
