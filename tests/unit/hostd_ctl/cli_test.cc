// The command line against no daemon: exit codes, words, output forms.
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/fd.h"
#include "common/model/layout.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hostd/ctl/client.h"
#include "hostd/ctl/job_file.h"
#include "hostd/ctl/resolve.h"
#include "hostd/ctl/socket_path.h"
#include "policy/plan.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"
#include "tests/testing/tiny_model.h"
#include "tests/unit/hostd_ctl/cli_fixture.h"

namespace slidedp::ctl {
namespace {

using ::slidedp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

TEST_F(CliTest, HelpIsDataAndExitsWithZero) {
  Outcome outcome = runner_.Run({"--help"});
  EXPECT_EQ(outcome.code, kExitOk);
  for (const char* verb :
       {"submit", "status", "show", "logs", "cancel", "drain", "undrain",
        "estimate", "doctor", "version", "watch", "Exit codes"}) {
    EXPECT_THAT(outcome.out, HasSubstr(verb));
  }
  outcome = runner_.Run({"submit", "--help"});
  EXPECT_EQ(outcome.code, kExitOk);
  EXPECT_THAT(outcome.out, HasSubstr("Relative paths"));
}

TEST_F(CliTest, AWrongCommandLineIsUsage) {
  const std::vector<std::vector<std::string>> lines = {
      {},
      {"nonsense"},
      {"submit"},
      {"submit", "a", "b"},
      {"submit", "job.yaml", "--set", "rnaks=2"},
      {"submit", "job.yaml", "--set", "ranks"},
      {"submit", "job.yaml", "--timeout", "-1"},
      {"status", "seven"},
      {"status", "-5"},
      {"show"},
      {"show", "1", "2"},
      {"logs"},
      {"logs", "1", "--tail", "x"},
      {"logs", "1", "--rank", "-2"},
      {"cancel"},
      {"cancel", "x"},
      {"drain"},
      {"drain", "--reason"},
      {"undrain", "x"},
      {"estimate"},
      {"estimate", "model", "--ranks", "0"},
      {"estimate", "model", "--set", "nonsense=1"},
      {"doctor", "x"},
      {"version", "x"},
      {"status", "-o", "xml"},
      {"status", "--color", "blue"},
      {"status", "--nonsense"},
      {"watch"},
  };
  for (const auto& line : lines) {
    Outcome outcome = runner_.Run(line);
    EXPECT_EQ(outcome.code, kExitUsage) << absl::StrCat(line.size());
    EXPECT_THAT(outcome.out, IsEmpty()) << line[0];
    EXPECT_THAT(outcome.err, Not(IsEmpty()));
  }
}

TEST_F(CliTest, WithoutADaemonEveryCallIsUnreachable) {
  WriteJob();
  std::string socket = folder_.Sub("none.sock");
  const std::vector<std::vector<std::string>> lines = {
      {"submit", "job.yaml"},
      {"submit", "job.yaml", "--wait"},
      {"status"},
      {"status", "1"},
      {"status", "-a"},
      {"show", "1"},
      {"watch", "1"},
      {"logs", "1"},
      {"logs", "1", "-f"},
      {"cancel", "1"},
      {"cancel", "1", "--wait"},
      {"drain", "--reason", "x"},
      {"undrain"}};
  for (auto line : lines) {
    if (line[0] == "watch") continue;  // below: it waits for a restart
    line.insert(line.begin(), {"--socket", socket});
    Outcome outcome = runner_.Run(line);
    EXPECT_EQ(outcome.code, kExitUnreachable) << line[2];
    EXPECT_THAT(outcome.out, IsEmpty()) << line[2];
    EXPECT_THAT(outcome.err,
                AllOf(HasSubstr(socket), HasSubstr("start slidedpd")))
        << line[2];
  }
}

TEST_F(CliTest, TheSocketsStateIsExplained) {
  EXPECT_THAT(
      ProbeSocket(folder_.Sub("none")),
      StatusIs(absl::StatusCode::kUnavailable, HasSubstr("does not exist")));
  EXPECT_THAT(ProbeSocket("/" + std::string(200, 'x')),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("longer")));
  std::string path = folder_.Sub("s");
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::strcpy(address.sun_path, path.c_str());
  ASSERT_EQ(
      bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof(address)),
      0);
  EXPECT_THAT(ProbeSocket(path), StatusIs(absl::StatusCode::kUnavailable,
                                          HasSubstr("nothing listens")));
  ASSERT_EQ(listen(fd.get(), 1), 0);
  EXPECT_OK(ProbeSocket(path));
  if (geteuid() != 0) {
    ASSERT_EQ(chmod(path.c_str(), 0), 0);
    EXPECT_THAT(ProbeSocket(path),
                StatusIs(absl::StatusCode::kPermissionDenied));
  }
}

TEST_F(CliTest, VersionNeedsNoDaemon) {
  Outcome outcome = runner_.Run({"version", "--socket", folder_.Sub("none")});
  EXPECT_EQ(outcome.code, kExitOk);
  EXPECT_THAT(outcome.out, StartsWith("slidedpctl "));
  EXPECT_THAT(outcome.err, HasSubstr("does not exist"));
  outcome =
      runner_.Run({"-o", "json", "version", "--socket", folder_.Sub("none")});
  EXPECT_EQ(outcome.json()["api_version"], "1");
  EXPECT_TRUE(outcome.json()["daemon"].is_null());
  EXPECT_TRUE(outcome.json()["client"]["version"].is_string());
}

TEST_F(CliTest, PrintDefaultsNeedsNothingAndIsAJobFile) {
  Outcome outcome = runner_.Run({"submit", "--print-defaults"});
  EXPECT_EQ(outcome.code, kExitOk);
  EXPECT_OK(ParseJobFile(outcome.out, "defaults", {}));
}

TEST_F(CliTest, DryRunShowsThePlanAndSubmitsNothing) {
  WriteJob("ranks: 2\nbatch_size: 4\n");
  Outcome outcome = runner_.Run({"submit", "job.yaml", "--dry-run"});
  EXPECT_EQ(outcome.code, kExitOk) << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("params"), HasSubstr("2 ranks"),
                                 HasSubstr(folder_.Sub("out"))));

  outcome = runner_.Run(
      {"submit", "job.yaml", "--dry-run", "-o", "json", "--set", "epochs=2"});
  ASSERT_EQ(outcome.code, kExitOk) << outcome.err;
  Json json = outcome.json();
  EXPECT_EQ(json["api_version"], "1");
  const Json& spec = json["spec"];
  EXPECT_EQ(spec["name"], "job");
  EXPECT_EQ(spec["model"], folder_.Sub("model"));
  EXPECT_EQ(spec["data"][0]["path"], folder_.Sub("data.safetensors"));
  EXPECT_EQ(spec["output"], folder_.Sub("out"));
  EXPECT_EQ(spec["dataset"]["sequences"], 64);  // 4096 tokens / 64
  EXPECT_EQ(spec["dataset"]["tokens"], 4096);
  EXPECT_EQ(spec["steps"], 32);  // 2 epochs x 64 sequences / 4
  EXPECT_EQ(spec["epochs"], 2.0);
  EXPECT_EQ(json["plan"]["ranks"], 2);
}

TEST_F(CliTest, AJobMayComeFromStandardInput) {
  Outcome outcome =
      runner_.Run({"submit", "-", "--dry-run", "-o", "json"},
                  "model: model\ndata: data.safetensors\noutput: out\n");
  ASSERT_EQ(outcome.code, kExitOk) << outcome.err;
  EXPECT_EQ(outcome.json()["spec"]["name"], "stdin");
  // The model's longest is less than 1024.
  EXPECT_EQ(outcome.json()["spec"]["sequence_length"], 512);
}

TEST_F(CliTest, RelativePathsStartAtTheCurrentFolder) {
  WriteJob();
  ASSERT_EQ(mkdir(folder_.Sub("sub").c_str(), 0755), 0);
  runner_.environment.current_folder = folder_.Sub("sub");
  Outcome outcome =
      runner_.Run({"submit", "../job.yaml", "--dry-run", "-o", "json", "--set",
                   "model=../model", "--set", "data=.././data.safetensors",
                   "--set", "output=new/../out"});
  ASSERT_EQ(outcome.code, kExitOk) << outcome.err;
  EXPECT_EQ(outcome.json()["spec"]["model"], folder_.Sub("model"));
  EXPECT_EQ(outcome.json()["spec"]["data"][0]["path"],
            folder_.Sub("data.safetensors"));
  EXPECT_EQ(outcome.json()["spec"]["output"], folder_.Sub("sub/out"));
}

TEST_F(CliTest, BadJobsAreOneErrorAndExitCodeOne) {
  ASSERT_EQ(mkdir(folder_.Sub("full").c_str(), 0755), 0);
  folder_.Write("full/file", "x");
  folder_.Write("text", "not a dataset");
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"ranks=two"}, "ranks = two"},
      {{"sequence_length=513"}, "at most 512 positions"},
      {{"model=absent"}, "absent"},
      {{"model=text"}, "config.json"},
      {{"data=absent.safetensors"}, "absent.safetensors"},
      {{"data=text"}, "data"},
      {{"data=[data.safetensors, text]"}, "data"},
      {{"packing=maybe"}, "packing = maybe"},
      {{"output=full"}, "full"},
      {{"output=absent/out"}, "absent"},
      {{"output=model/out"}, "model's own folder"},
      {{"output=model"}, "model's own folder"},
      {{"schedule.warmup_steps=1000"}, "warmup_steps"},
      {{"tuning.h2d_chunk_bytes=100"}, "h2d_chunk_bytes"},
  };
  for (const auto& [sets, part] : cases) {
    WriteJob("steps: 10\n");
    std::vector<std::string> args = {"submit", "job.yaml", "--dry-run"};
    for (const std::string& set : sets) {
      args.push_back("--set");
      args.push_back(set);
    }
    Outcome outcome = runner_.Run(args);
    EXPECT_EQ(outcome.code, kExitFailure) << sets[0];
    EXPECT_THAT(outcome.err, HasSubstr(part)) << sets[0];
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1)
        << outcome.err;
    EXPECT_THAT(outcome.out, IsEmpty()) << sets[0];
  }
  for (const char* key : {"model", "data", "output"}) {
    std::string text;
    for (const char* other : {"model", "data", "output"}) {
      if (std::string(other) != key) absl::StrAppend(&text, other, ": x\n");
    }
    folder_.Write("job.yaml", text);
    Outcome outcome = runner_.Run({"submit", "job.yaml", "--dry-run"});
    EXPECT_EQ(outcome.code, kExitFailure);
    EXPECT_THAT(outcome.err,
                HasSubstr(absl::StrCat("job.yaml: ", key, ": is required")));
  }
  Outcome outcome = runner_.Run({"submit", "absent.yaml"});
  EXPECT_EQ(outcome.code, kExitFailure);
  EXPECT_THAT(outcome.err, HasSubstr("absent.yaml"));
}

TEST_F(CliTest, ColorIsOnlyForTerminals) {
  auto has_color = [&](const std::vector<std::string>& more) {
    std::vector<std::string> args = {"estimate", "model"};
    args.insert(args.end(), more.begin(), more.end());
    return runner_.Run(args).out.find("\x1b[") != std::string::npos;
  };
  EXPECT_FALSE(has_color({}));
  EXPECT_TRUE(has_color({"--color", "always"}));
  runner_.environment.out_is_terminal = true;
  runner_.environment.term = "xterm";
  EXPECT_TRUE(has_color({}));
  EXPECT_FALSE(has_color({"--color", "never"}));
  EXPECT_FALSE(has_color({"-o", "json"}));
  runner_.environment.no_color = "1";
  EXPECT_FALSE(has_color({}));
  runner_.environment.no_color = "";
  runner_.environment.term = "dumb";
  EXPECT_FALSE(has_color({}));
}

TEST_F(CliTest, TheSocketsDefaultFollowsTheStatedOrder) {
  testing::TempFolder root;
  Environment environment;
  environment.uid = geteuid();
  environment.current_folder = "/here";
  environment.system_root = root.path();
  std::string tmp = absl::StrCat(root.path(), "/tmp/slidedpd-", geteuid());
  EXPECT_EQ(*SocketPath("", environment), tmp + "/slidedpd.sock");
  environment.xdg_runtime_dir = "/run/user/5";
  EXPECT_EQ(*SocketPath("", environment), "/run/user/5/slidedpd/slidedpd.sock");
  ASSERT_EQ(mkdir(root.Sub("run").c_str(), 0755), 0);
  ASSERT_EQ(mkdir(root.Sub("run/slidedpd").c_str(), 0755), 0);
  std::string system = root.Write("run/slidedpd/slidedpd.sock", "");
  EXPECT_EQ(*SocketPath("", environment), system);
  environment.socket = "relative.sock";
  EXPECT_EQ(*SocketPath("", environment), "/here/relative.sock");
  EXPECT_EQ(*SocketPath("/flag.sock", environment), "/flag.sock");
}

TEST_F(CliTest, AForeignFolderInTmpIsNotTrusted) {
  testing::TempFolder root;
  Environment environment;
  environment.uid = geteuid() + 1;
  environment.system_root = root.path();
  ASSERT_EQ(mkdir(root.Sub("tmp").c_str(), 0755), 0);
  std::string folder = root.Sub(absl::StrCat("tmp/slidedpd-", environment.uid));
  ASSERT_EQ(mkdir(folder.c_str(), 0700), 0);
  EXPECT_THAT(SocketPath("", environment),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr(folder)));
}

}  // namespace
}  // namespace slidedp::ctl
