// slidedpctl bench without a daemon: its files, figures and processes.
#include "hostd/ctl/bench.h"

#include <sys/wait.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <sstream>
#include <vector>

#include "common/base/fd.h"
#include "common/base/units.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hostd/ctl/bench_files.h"
#include "hostd/ctl/bench_process.h"
#include "hostd/ctl/bench_report.h"
#include "hostd/ctl/resolve.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"
#include "tests/unit/hostd_ctl/run_ctl.h"
#include "worker/data/dataset.h"

namespace slidedp::ctl {
namespace {

using ::slidedp::testing::StatusIs;
using ::testing::HasSubstr;

TEST(BenchFilesTest, ModelFolderIsOneThatResolveReads) {
  ASSERT_OK_AND_ASSIGN(ScratchFolder folder,
                       ScratchFolder::Create(::testing::TempDir()));
  ASSERT_OK_AND_ASSIGN(model::Shape shape, model::FindShape("qwen3-0.6b"));
  shape.layers = 2;
  shape.vocab = 1000;
  ASSERT_OK(WriteBenchModel(folder.path(), shape));
  ASSERT_OK_AND_ASSIGN(ModelFacts facts,
                       ReadModelFacts(folder.path() + "/model"));
  EXPECT_EQ(facts.config.layers, 2);
  EXPECT_EQ(facts.config.vocab, 1000);
}

TEST(BenchFilesTest, TokensAreADatasetOfThatManySequences) {
  ASSERT_OK_AND_ASSIGN(ScratchFolder folder,
                       ScratchFolder::Create(::testing::TempDir()));
  const std::string path = folder.path() + "/tokens.safetensors";
  ASSERT_OK(WriteRandomTokens(path, 5, 64, 151936));
  ASSERT_OK_AND_ASSIGN(data::Dataset dataset,
                       data::Dataset::Open(path, 64, 151936));
  EXPECT_EQ(dataset.sequences(), 5);
  EXPECT_EQ(dataset.valid_tokens(), 5 * 63);
  int32_t ids[64], labels[64];
  dataset.Fill(3, ids, labels);
  for (int32_t id : ids) EXPECT_LT(id, 151936);
}

TEST(BenchFilesTest, TokensAreAsFrequentAsWords) {
  ASSERT_OK_AND_ASSIGN(ScratchFolder folder,
                       ScratchFolder::Create(::testing::TempDir()));
  const std::string path = folder.path() + "/tokens.safetensors";
  constexpr int64_t kVocab = 1000, kTokens = 100'000;
  ASSERT_OK(WriteRandomTokens(path, 1, kTokens, kVocab));
  ASSERT_OK_AND_ASSIGN(data::Dataset dataset,
                       data::Dataset::Open(path, kTokens, kVocab));
  std::vector<int32_t> ids(kTokens), labels(kTokens);
  dataset.Fill(0, ids.data(), labels.data());
  std::vector<int64_t> counts(kVocab);
  for (int32_t id : ids) ++counts.at(id);
  std::sort(counts.begin(), counts.end(), std::greater<>());
  // The k-th most frequent of n words: n ln(1 + 1/k) / ln(V + 1); within five
  // standard deviations.
  for (const int k : {1, 2, 10, 50}) {
    const double want = kTokens * std::log1p(1.0 / k) / std::log(kVocab + 1.0);
    EXPECT_NEAR(static_cast<double>(counts[k - 1]), want, 5 * std::sqrt(want))
        << k;
  }
}

TEST(BenchFilesTest, ScratchFolderIsRemovedWithItsContents) {
  std::string path;
  {
    ASSERT_OK_AND_ASSIGN(ScratchFolder folder,
                         ScratchFolder::Create(::testing::TempDir()));
    path = folder.path();
    ASSERT_OK(WriteFileAtomically(path + "/file", "x"));
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(MedianTest, IsTheMiddle) {
  EXPECT_EQ(Median({3, 1, 2}), 2);
  EXPECT_EQ(Median({4, 1, 2, 3}), 2.5);
  EXPECT_EQ(Median({7}), 7);
}

class BenchReportTest : public ::testing::Test {
 protected:
  // Two ranks, 8 sequences of 128; 2 steps before 3 measured ones. Steps
  // overlap: each lasts 3 s on its own and ends 2 s after the one before, the
  // last 2.5 s.
  static BenchRun Run() {
    BenchRun run;
    run.model = "qwen3-8b";
    model::Shape shape = *model::FindShape("qwen3-8b");
    run.config =
        *model::ParseModelConfig(model::ConfigJson(shape), "config.json");
    run.parameters = 8'190'735'360;
    run.warmup = 2;
    run.command = "slidedpctl bench";
    run.spec.set_ranks(2);
    run.spec.set_sequence_length(128);
    run.spec.set_batch_size(8);
    run.spec.set_micro_batch_size(4);
    run.spec.set_steps(5);
    run.info.set_id(7);
    run.info.set_host_pss_peak_bytes(90 * kGiB);
    run.info.set_device_peak_bytes(1234);
    const double ends[] = {10, 12, 14, 16, 18.5};
    for (int i = 0; i < 5; ++i) {
      v1::StepRecord record;
      record.set_step(i + 1);
      record.set_loss(12 - i);
      record.set_seconds(3);
      record.set_end_ns(static_cast<int64_t>(ends[i] * 1e9));
      record.set_clip_coefficient(i == 3 ? 0.5 : 1);
      record.set_compute_ns(1'500'000'000);
      record.set_stall_ns(100'000'000);
      record.set_deliver_ns(700'000'000);
      run.records.push_back(record);
    }
    return run;
  }
};

TEST_F(BenchReportTest, StepsLastFromEndToEndAndWarmupIsLeftOut) {
  const BenchRun run = Run();
  ASSERT_OK_AND_ASSIGN(Json json, JsonBench(run));
  EXPECT_EQ(json["steps"], 3);
  EXPECT_EQ(json["step_seconds"]["all"].size(), 3);
  EXPECT_DOUBLE_EQ(json["step_seconds"]["median"], 2);
  EXPECT_DOUBLE_EQ(json["step_seconds"]["max"], 2.5);
  EXPECT_DOUBLE_EQ(json["tokens_per_second"], 8 * 128 / 2.0);
  const model::StepFlops flops = model::ModelFlops(run.config, 8 * 128, 128);
  EXPECT_DOUBLE_EQ(json["model_flops_per_step"]["total"], flops.total());
  EXPECT_DOUBLE_EQ(json["model_tflops_per_gpu"],
                   flops.total() / 2.0 / 2 * 1e-12);
  EXPECT_DOUBLE_EQ(json["host_gib_per_billion_parameters"], 90 / 8.190735360);
  EXPECT_EQ(json["device_peak_bytes"], 1234);
  EXPECT_DOUBLE_EQ(json["lane_busy_seconds"]["deliver"], 0.7);
  EXPECT_DOUBLE_EQ(json["exposed_seconds"]["compute_stall"], 0.1);
  EXPECT_DOUBLE_EQ(json["exposed_seconds"]["not_compute"], 0.5);
  EXPECT_DOUBLE_EQ(json["first_loss"], 12);
  EXPECT_DOUBLE_EQ(json["last_loss"], 8);
  EXPECT_EQ(json["steps_clipped"], 1);
  EXPECT_FALSE(json.contains("excess_over_reference"));
}

TEST_F(BenchReportTest, ExcessIsOverTheReferencesStep) {
  BenchRun run = Run();
  run.reference = Json::parse(
      R"({"value": 600, "detail": {"step_seconds": {"median": 1.6}}})");
  ASSERT_OK_AND_ASSIGN(Json json, JsonBench(run));
  EXPECT_DOUBLE_EQ(json["excess_over_reference"], 0.25);
  std::ostringstream out;
  PrintBench(json, out);
  EXPECT_THAT(out.str(), HasSubstr("25.00 %"));
  EXPECT_THAT(out.str(), HasSubstr("2.0000 s (2.0000 to 2.5000)"));
}

TEST_F(BenchReportTest, MissingRecordIsAnError) {
  BenchRun run = Run();
  run.records.pop_back();
  EXPECT_THAT(JsonBench(run),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("4 of 5")));
}

TEST(BenchCommandTest, BadOptionsAreUsageErrorsThatNameThem) {
  const struct {
    std::vector<std::string> args;
    const char* named;
  } kCases[] = {
      {{"bench"}, "--model"},
      {{"bench", "--model", "qwen3-8b", "--steps", "0"}, "--steps"},
      {{"bench", "--model", "qwen3-8b", "--seq", "0"}, "--seq"},
      {{"bench", "--model", "qwen3-8b", "--ranks", "65"}, "--ranks"},
      {{"bench", "--model", "qwen3-8b", "--device", "tpu"}, "--device"},
      {{"bench", "--model", "qwen3-8b", "--set", "steps=3"}, "steps=3"},
      {{"bench", "--model", "qwen3-8b", "--set", "nonsense=3"}, "nonsense"},
  };
  for (const auto& c : kCases) {
    CtlRunner ctl;
    const Outcome outcome = ctl.Run(c.args);
    EXPECT_EQ(outcome.code, kExitUsage) << c.named;
    EXPECT_THAT(outcome.err, HasSubstr(c.named));
  }
  CtlRunner ctl;
  const Outcome outcome = ctl.Run({"bench", "--model", "qwen9-8b"});
  EXPECT_EQ(outcome.code, kExitFailure);
  EXPECT_THAT(outcome.err, HasSubstr("qwen3-8b"));
}

class ChildProcessTest : public ::testing::Test {
 protected:
  testing::TempFolder folder_;
  Interrupt interrupt_;
};

TEST_F(ChildProcessTest, TellsExitAndKeepsOutput) {
  ASSERT_OK_AND_ASSIGN(
      ChildProcess child,
      ChildProcess::Start({"/bin/sh", "-c", "echo out; echo err >&2; exit 3"},
                          folder_.Sub("log")));
  ASSERT_OK_AND_ASSIGN(int status, child.Wait(interrupt_));
  EXPECT_EQ(WEXITSTATUS(status), 3);
  EXPECT_EQ(LogTail(folder_.Sub("log")), "out\nerr\n");
}

TEST_F(ChildProcessTest, NoProgramIsAnError) {
  EXPECT_THAT(ChildProcess::Start({"/nonexistent/program"}, folder_.Sub("log"))
                  .status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("/nonexistent")));
}

TEST_F(ChildProcessTest, InterruptEndsTheChild) {
  ASSERT_OK_AND_ASSIGN(
      ChildProcess child,
      ChildProcess::Start({"/bin/sleep", "1000"}, folder_.Sub("log")));
  interrupt_.Raise();
  EXPECT_THAT(child.Wait(interrupt_).status(),
              StatusIs(absl::StatusCode::kCancelled, HasSubstr("interrupted")));
  std::optional<int> status = child.Poll();
  ASSERT_TRUE(status.has_value());
  EXPECT_EQ(WTERMSIG(*status), SIGTERM);
}

TEST_F(ChildProcessTest, DaemonThatDoesNotStartIsToldWithItsLog) {
  const std::string program = folder_.Sub("slidedpd");
  ASSERT_OK(WriteFileAtomically(program, "#!/bin/sh\necho no luck; exit 1\n"));
  std::filesystem::permissions(program, std::filesystem::perms::owner_all);
  EXPECT_THAT(StartPrivateDaemon(program, folder_.path(), interrupt_).status(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("no luck")));
}

}  // namespace
}  // namespace slidedp::ctl
