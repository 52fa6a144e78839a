// The subcommands of slidedp-bench-ops at sizes that a CPU does in a moment:
// that they run, and that their lines say what the sizes imply.
#include <fstream>
#include <map>

#include "common/model/shapes.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"
#include "worker/bench/commands.h"
#include "worker/bench/op_list.h"

namespace slidedp::bench {
namespace {

using ::slidedp::testing::StatusIs;
using ::testing::HasSubstr;

class BenchOpsTest : public ::testing::Test {
 protected:
  BenchOpsTest() {
    options_.model = "qwen2.5-0.5b";  // with biases, head size 64
    options_.layers = 2;
    options_.vocab = 503;
    options_.sequence = 17;
    options_.micro_batch_size = 2;
    options_.steps = 2;
    options_.warmup = 1;
    options_.machine.device = "cpu";
    options_.machine.threads = 2;
    options_.machine.samples = 1;
    options_.machine.sample_seconds = 0;
    options_.origin = {folder_.Sub("results.jsonl"), "abc123", "test machine",
                       "slidedp-bench-ops test"};
  }

  std::vector<Json> Lines() {
    std::vector<Json> lines;
    std::ifstream file(options_.origin.json_file);
    for (std::string line; std::getline(file, line);) {
      lines.push_back(Json::parse(line));
    }
    return lines;
  }

  testing::TempFolder folder_;
  Options options_;
};

TEST_F(BenchOpsTest, LinesHaveTheFieldsOfAResultsFile) {
  ASSERT_OK(Report({"x", 1.5, "GB/s", ">= 1", {{"a", 2}}}, options_.origin));
  ASSERT_OK(Report({"y", 2.5, "s", "", {}}, options_.origin));
  const std::vector<Json> lines = Lines();
  ASSERT_EQ(lines.size(), 2);
  std::vector<std::string> keys;
  for (const auto& [key, value] : lines[0].items()) keys.push_back(key);
  EXPECT_THAT(
      keys, ::testing::ElementsAre("bench", "value", "unit", "target", "commit",
                                   "date", "machine", "command", "detail"));
  EXPECT_EQ(lines[0]["value"], 1.5);
  EXPECT_EQ(lines[0]["commit"], "abc123");
  EXPECT_EQ(lines[0]["detail"]["a"], 2);
  EXPECT_EQ(lines[1]["bench"], "y");
}

TEST_F(BenchOpsTest, StepReportsModelFlopsOfItsMedianStep) {
  for (bool recompute : {false, true}) {
    options_.recompute = recompute;
    options_.micro_batches = 2;
    ASSERT_OK(RunStep(options_));
    const Json line = Lines().back();
    EXPECT_EQ(line["bench"], recompute ? "compute-only-qwen2.5-0.5b-recompute"
                                       : "compute-only-qwen2.5-0.5b");
    const Json& detail = line["detail"];
    EXPECT_EQ(detail["layers_that_recompute_nothing"], recompute ? 0 : 2);
    EXPECT_EQ(detail["step_seconds"]["all"].size(), 2);
    const double step = detail["step_seconds"]["median"];
    EXPECT_GT(step, 0);
    ASSERT_OK_AND_ASSIGN(model::ModelConfig config, ConfigOf(options_));
    const double flops = model::ModelFlops(config, 2 * 2 * 17, 17).total();
    EXPECT_DOUBLE_EQ(line["value"], flops / step * 1e-12);
    EXPECT_GT(detail["compute_busy_seconds"].get<double>(), 0);
  }
}

TEST_F(BenchOpsTest, LayerIsComparedWithItsProducts) {
  ASSERT_OK(RunLayer(options_));
  const Json line = Lines().back();
  EXPECT_EQ(line["bench"], "layer-qwen2.5-0.5b");
  const Json& detail = line["detail"];
  // Four linear layers with three products each, attention twice.
  EXPECT_EQ(detail["alone_seconds"].size(), 14);
  double alone = 0;
  for (const auto& [name, seconds] : detail["alone_seconds"].items()) {
    EXPECT_GT(seconds.get<double>(), 0) << name;
    alone += seconds.get<double>();
  }
  EXPECT_DOUBLE_EQ(line["value"],
                   (detail["forward_seconds"].get<double>() +
                    detail["backward_seconds"].get<double>()) /
                       (detail["alone_forward_seconds"].get<double>() +
                        detail["alone_backward_seconds"].get<double>()));
  EXPECT_NEAR(alone,
              detail["alone_forward_seconds"].get<double>() +
                  detail["alone_backward_seconds"].get<double>(),
              1e-9);
}

TEST_F(BenchOpsTest, HeadTellsItsShareAndItsMemory) {
  options_.head_chunk_tokens = 5;
  ASSERT_OK(RunHead(options_));
  const std::vector<Json> lines = Lines();
  ASSERT_EQ(lines.size(), 2);
  EXPECT_EQ(lines[0]["bench"], "loss-head-503");
  const Json& detail = lines[0]["detail"];
  EXPECT_EQ(detail["tokens"], 34);
  EXPECT_EQ(detail["chunk_tokens"], 5);
  EXPECT_DOUBLE_EQ(lines[0]["value"],
                   detail["tflops"].get<double>() /
                       detail["best_gemm_tflops"].get<double>());
  EXPECT_EQ(lines[1]["bench"], "loss-head-503-memory");
  // A chunk of float32 logits, in whole pages.
  EXPECT_EQ(detail["logits_bytes"], (5 * 503 * 4 + 4095) / 4096 * 4096);
}

TEST_F(BenchOpsTest, OpsTableHasEveryOpOfAStep) {
  ASSERT_OK(RunOps(options_));
  const Json line = Lines().back();
  std::map<std::string, Json> rows;
  for (const Json& row : line["detail"]["ops"]) {
    rows[row["op"].get<std::string>()] = row;
    EXPECT_GT(row["seconds"].get<double>(), 0);
    EXPECT_GT(row["share"].get<double>(), 0);
  }
  EXPECT_EQ(rows.size(), line["detail"]["ops"].size()) << "names are unique";
  for (const char* name :
       {"qkv.forward", "down.weight_gradient", "attention.backward",
        "rms_norm.backward", "qk_norm_rope.forward", "swiglu.backward",
        "embedding.backward", "head.input_gradient", "cross_entropy",
        "cast_to_bf16", "squared_norm"}) {
    EXPECT_TRUE(rows.contains(name)) << name;
  }
  // 2 x tokens x in x out of qkv.
  EXPECT_NEAR(rows["qkv.forward"]["tflops"].get<double>() * 1e12 *
                  rows["qkv.forward"]["seconds"].get<double>(),
              2.0 * 34 * 896 * 1152, 1);
  EXPECT_EQ(line["value"], [&] {
    double best = 0;
    for (const auto& [name, row] : rows) {
      if (row.contains("tflops") && !name.starts_with("attention")) {
        best = std::max(best, row["tflops"].get<double>());
      }
    }
    return best;
  }());
}

TEST_F(BenchOpsTest, UnknownShapeIsAnError) {
  options_.model = "gpt-7";
  for (auto* run : {RunOps, RunLayer, RunHead, RunStep}) {
    EXPECT_THAT(run(options_),
                StatusIs(absl::StatusCode::kNotFound, HasSubstr("gpt-7")));
  }
}

}  // namespace
}  // namespace slidedp::bench
