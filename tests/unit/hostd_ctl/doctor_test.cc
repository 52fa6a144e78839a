#include "hostd/ctl/doctor.h"

#include <sys/stat.h>

#include <filesystem>
#include <sstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/temp_folder.h"

namespace slidedp::ctl {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class DoctorTest : public ::testing::Test {
 protected:
  DoctorTest() {
    for (const char* folder :
         {"proc/self", "sys/kernel/mm/transparent_hugepage",
          "sys/devices/system/node"}) {
      std::filesystem::create_directories(root_.Sub(folder));
    }
    WriteMemory(8 << 20);
    WriteHugePages("always within_size [advise] never deny force");
    root_.Write("sys/devices/system/node/online", "0\n");
    root_.Write("proc/self/cgroup", "");
    root_.Write("proc/self/mountinfo", "");
    environment_.system_root = root_.path();
    environment_.logical_cpus = 2;
    environment_.current_folder = "/";
  }

  void WriteMemory(uint64_t available_kib) {
    root_.Write("proc/meminfo",
                "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable: " +
                    std::to_string(available_kib) + " kB\n");
  }
  void WriteHugePages(const std::string& line) {
    root_.Write("sys/kernel/mm/transparent_hugepage/shmem_enabled",
                line + "\n");
  }

  Finding Get(const std::string& check) {
    for (const Finding& finding : RunDoctor(environment_, Socket())) {
      if (finding.check == check) return finding;
    }
    ADD_FAILURE() << "no check " << check;
    return {};
  }
  std::string Socket() const { return root_.Sub("none.sock"); }

  testing::TempFolder root_;
  Environment environment_;
};

TEST_F(DoctorTest, EveryFindingThatIsNotOkSaysWhatToDo) {
  WriteMemory(1000);
  WriteHugePages("always [never]");
  for (const Finding& finding : RunDoctor(environment_, Socket())) {
    EXPECT_NE(finding.found, "") << finding.check;
    if (finding.health != Health::kOk) {
      EXPECT_NE(finding.remedy, "") << finding.check;
    }
  }
}

TEST_F(DoctorTest, MemoryIsWhatIsFree) {
  EXPECT_EQ(Get("memory").health, Health::kOk);
  EXPECT_THAT(Get("memory").found,
              AllOf(HasSubstr("8.00 GiB free"), HasSubstr("16.00 GiB")));
  WriteMemory(1000);
  EXPECT_EQ(Get("memory").health, Health::kWarn);
  std::filesystem::remove(root_.Sub("proc/meminfo"));
  EXPECT_EQ(Get("memory").health, Health::kFail);
}

TEST_F(DoctorTest, HugePagesOfSharedMemory) {
  EXPECT_EQ(Get("huge pages").health, Health::kOk);
  EXPECT_THAT(Get("huge pages").found, HasSubstr("advise"));
  WriteHugePages("always within_size advise [never] deny force");
  EXPECT_EQ(Get("huge pages").health, Health::kWarn);
  EXPECT_THAT(Get("huge pages").remedy, HasSubstr("echo advise"));
  std::filesystem::remove_all(root_.Sub("sys/kernel"));
  EXPECT_EQ(Get("huge pages").health, Health::kWarn);
}

TEST_F(DoctorTest, NumaNodes) {
  EXPECT_EQ(Get("numa").found, "one node");
  root_.Write("sys/devices/system/node/online", "0-3\n");
  EXPECT_THAT(Get("numa").found, HasSubstr("0-3"));
}

TEST_F(DoctorTest, WithoutASocketThereIsNoDaemonToAsk) {
  std::vector<Finding> findings = RunDoctor(environment_, Socket());
  EXPECT_EQ(findings.back().check, "socket");
  EXPECT_EQ(findings.back().health, Health::kFail);
  EXPECT_TRUE(AnyFailed(findings));
  std::string file = root_.Write("file", "");
  findings = RunDoctor(environment_, file);
  EXPECT_THAT(findings.back().found, HasSubstr("not a socket"));
}

TEST_F(DoctorTest, TableAndJsonHoldTheSameFindings) {
  std::vector<Finding> findings = RunDoctor(environment_, Socket());
  std::ostringstream out;
  PrintDoctor(findings, /*headers=*/true, /*color=*/false, out);
  Json json = JsonDoctor(findings);
  EXPECT_EQ(json["findings"].size(), findings.size());
  EXPECT_EQ(json["ok"], false);
  for (const Finding& finding : findings) {
    EXPECT_THAT(out.str(), HasSubstr(finding.found));
  }
  EXPECT_THAT(out.str(), AllOf(HasSubstr("fail"), Not(HasSubstr("\x1b"))));
}

}  // namespace
}  // namespace slidedp::ctl
