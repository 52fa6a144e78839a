// What slidedp-worker is started with.
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>

#include "nlohmann/json.hpp"
#include "tests/unit/worker_session/session_fixture.h"

namespace slidedp::session {
namespace {

using ::testing::HasSubstr;

// What the worker says of its build and the GPUs that it sees.
nlohmann::json Probe() {
  FILE* pipe = popen(SLIDEDP_WORKER " --probe", "r");
  SDP_CHECK(pipe != nullptr, "popen");
  std::array<char, 65536> text;
  const size_t bytes = fread(text.data(), 1, text.size(), pipe);
  EXPECT_EQ(pclose(pipe), 0);
  return nlohmann::json::parse(text.data(), text.data() + bytes);
}

TEST_F(SessionTest, TheProbeNamesBuildAndGpus) {
  const nlohmann::json probe = Probe();
  ASSERT_TRUE(probe.at("cuda").is_boolean());
  EXPECT_TRUE(probe.at("problem").is_string());
  EXPECT_TRUE(probe.at("gpus").is_array());
  for (const nlohmann::json& gpu : probe.at("gpus")) {
    EXPECT_GT(gpu.at("memory_bytes").get<uint64_t>(), 0);
    EXPECT_THAT(gpu.at("uuid").get<std::string>(), HasSubstr("-"));
  }
  if (!probe.at("cuda").get<bool>()) EXPECT_TRUE(probe.at("gpus").empty());
}

TEST_F(SessionTest, AGpuThatIsNotThereIsAFailureBeforeHello) {
  const nlohmann::json probe = Probe();
  if (!probe.at("gpus").empty()) GTEST_SKIP() << "there is a GPU";
  device_ = "cuda";
  int code = RunWorker([](Stream& stream) {
    EXPECT_EQ(Next(stream).what_case(), v1::WorkerMessage::WHAT_NOT_SET);
    return grpc::Status::OK;
  });
  EXPECT_EQ(code, 1);
  EXPECT_THAT(Log(), HasSubstr(probe.at("cuda").get<bool>()
                                   ? "NVIDIA"
                                   : "this build has no CUDA"));
}

TEST_F(SessionTest, WithoutAGpuAutoIsTheCpu) {
  if (!Probe().at("gpus").empty()) GTEST_SKIP() << "there is a GPU";
  device_ = "auto";
  int code = RunWorker([this](Stream& stream) {
    Join(stream);
    return Leave(stream);
  });
  EXPECT_EQ(code, 0) << Log();
}

TEST_F(SessionTest, AWrongCommandLineIsUsage) {
  for (const char* args :
       {"", "--job 1", "--job 0 --rank 0 --socket x",
        "--job x --rank 0 --socket x", "--job 1 --rank -1 --socket x",
        "--job 1 --rank 0 --socket x --log-level loud",
        "--job 1 --rank 0 --socket x --device gpu",
        "--job 1 --rank 0 --socket x --more"}) {
    std::string command =
        absl::StrCat(SLIDEDP_WORKER, " ", args, " >/dev/null 2>&1");
    int status = std::system(command.c_str());
    ASSERT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 2) << args;
  }
}

}  // namespace
}  // namespace slidedp::session
