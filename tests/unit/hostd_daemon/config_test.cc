#include "hostd/daemon/config.h"

#include "tests/testing/status_matchers.h"

namespace slidedp::hostd {
namespace {

using ::slidedp::testing::IsOkAndHolds;
using ::slidedp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Pair;
using ::testing::UnorderedElementsAre;

TEST(ConfigTest, DefaultsDependOnTheUser) {
  Config root =
      DefaultConfig({0, "/run/user/0", "", "/home/admin", "/usr/bin/slidedpd"});
  EXPECT_EQ(root.runtime_dir, "/run/slidedpd");
  EXPECT_EQ(root.state_dir, "/var/lib/slidedpd");
  EXPECT_EQ(root.worker_binary, "/usr/bin/slidedp-worker");

  Config user =
      DefaultConfig({1000, "/run/user/1000", "", "/home/ada", "/opt/slidedpd"});
  EXPECT_EQ(user.control_socket(), "/run/user/1000/slidedpd/slidedpd.sock");
  EXPECT_EQ(user.journal_file(), "/home/ada/.local/state/slidedpd/jobs.sqlite");

  Config bare = DefaultConfig({1000, "", "/state", "", "/opt/slidedpd"});
  EXPECT_EQ(bare.runtime_dir, "/tmp/slidedpd-1000");
  EXPECT_EQ(bare.log_folder(12), "/state/slidedpd/logs/12");
  EXPECT_OK(Validate(root));
  EXPECT_OK(Validate(user));
  EXPECT_OK(Validate(bare));
}

TEST(ConfigTest, EverySettingTakesAValueOrSaysWhatItIsFor) {
  for (const Setting& setting : Settings()) {
    Config config;
    absl::Status status = Apply(config, "test", setting.key, "\x01");
    if (!status.ok()) {
      EXPECT_THAT(status, StatusIs(absl::StatusCode::kInvalidArgument,
                                   AllOf(HasSubstr(setting.key),
                                         HasSubstr(setting.help))));
    }
  }
  EXPECT_GE(Settings().size(), 15);
}

TEST(ConfigTest, BadValuesNameSourceKeyAndValue) {
  struct Case {
    const char* key;
    const char* value;
  };
  for (const Case& c :
       std::initializer_list<Case>{{"runtime_dir", "relative/path"},
                                   {"runtime_dir", ""},
                                   {"lease_s", "20s"},
                                   {"lease_s", "-3"},
                                   {"lease_s", "1"},
                                   {"lease_s", "99999999999999999999999"},
                                   {"max_running_jobs", "0"},
                                   {"max_host_bytes", "64 potatoes"},
                                   {"max_host_bytes", "-1GiB"},
                                   {"max_host_bytes", "nanGiB"},
                                   {"max_host_bytes", "1e300GiB"},
                                   {"log_max_bytes", "1"},
                                   {"heartbeat_s", "0"}}) {
    Config config;
    EXPECT_THAT(Apply(config, "FILE.yaml", c.key, c.value),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("FILE.yaml"), HasSubstr(c.key))))
        << c.key << "=" << c.value;
  }
  Config config;
  EXPECT_THAT(
      Apply(config, "FILE.yaml", "leese_s", "3"),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("no such setting"), HasSubstr("lease_s"))));
}

TEST(ConfigTest, BytesHaveBinaryUnits) {
  EXPECT_THAT(ParseBytes("4096"), IsOkAndHolds(4096u));
  EXPECT_THAT(ParseBytes("18446744073709551615"),
              IsOkAndHolds(18446744073709551615u));
  EXPECT_THAT(ParseBytes("512MiB"), IsOkAndHolds(512 * kMiB));
  EXPECT_THAT(ParseBytes("1.5 GiB"), IsOkAndHolds(3 * kGiB / 2));
  EXPECT_THAT(ParseBytes("2TiB"), IsOkAndHolds(2048 * kGiB));
  EXPECT_THAT(ParseBytes("7B"), IsOkAndHolds(7u));
  for (const char* bad :
       {"", "GiB", "1GB", "1.5", "0x10", ".5GiB", "1 1GiB", "infB"}) {
    EXPECT_FALSE(ParseBytes(bad).ok()) << bad;
  }
}

TEST(ConfigTest, FileIsAFlatMap) {
  EXPECT_THAT(ParseConfigFile("", "f"), IsOkAndHolds(UnorderedElementsAre()));
  EXPECT_THAT(
      ParseConfigFile("lease_s: 30\nmax_host_bytes: 1GiB # most\n", "f"),
      IsOkAndHolds(UnorderedElementsAre(Pair("lease_s", "30"),
                                        Pair("max_host_bytes", "1GiB"))));
  for (const char* bad :
       {"- a\n", "text", "a: [1]\n", "a: {b: 1}\n", "a: 1\na: 2\n", "[1]: 2\n",
        "? {a: b}\n: 1\n", "a:\n", "\tq: 1", "a: *b\n"}) {
    EXPECT_THAT(
        ParseConfigFile(bad, "some.yaml"),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("some.yaml")))
        << bad;
  }
}

TEST(ConfigTest, RelationsAreChecked) {
  Config config = DefaultConfig({0, "", "", "", "/x"});
  config.lease_s = 3;
  config.heartbeat_s = 2;
  EXPECT_THAT(Validate(config), StatusIs(absl::StatusCode::kInvalidArgument,
                                         HasSubstr("lease_s")));
  config = DefaultConfig({0, "", "", "", "/x"});
  config.runtime_dir = "/" + std::string(100, 'x');
  EXPECT_THAT(Validate(config), StatusIs(absl::StatusCode::kInvalidArgument,
                                         HasSubstr("too long")));
  EXPECT_FALSE(Validate(DefaultConfig({1000, "", "", "", "/x"})).ok());
}

}  // namespace
}  // namespace slidedp::hostd
