// Jobs in one process: update modes with a real model, and jobs that fail.
#include "tests/local_job/local_job.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"
#include "tests/testing/tiny_model.h"

namespace slidedp::testing {
namespace {

using ::testing::HasSubstr;

class LocalJobTest : public ::testing::Test {
 protected:
  LocalJobOptions Options(policy::UpdateMode mode) {
    TinyModelOptions model;
    model.layers = 2;
    model.hidden = 32;
    model.intermediate = 48;
    model.vocab = 211;
    const std::string folder = folder_.Sub("model");
    WriteTinyModel(folder, model);
    TokenDatasetOptions data;
    data.vocab = model.vocab;
    data.tokens = 40 * 24;
    const std::string file = folder_.Sub("data.safetensors");
    WriteTokenDataset(file, data);

    LocalJobOptions options;
    options.model = folder;
    options.data = file;
    options.problem.sequence_length = 24;
    options.problem.batch_size = 4;
    options.problem.micro_batch_size = 2;
    options.problem.ranks = 2;
    options.problem.compute_threads = 1;
    options.problem.update_threads = 2;
    options.problem.d2h_chunk_bytes = 4096;
    options.problem.update_mode = mode;
    options.problem.clipping = mode != policy::UpdateMode::kEager;
    options.update.lr = 1e-5;
    options.update.beta1 = 0.9;
    options.update.beta2 = 0.999;
    options.update.eps = 1e-8;
    options.update.weight_decay = 0.1;
    options.update.schedule.kind = policy::LrScheduleKind::kConstant;
    options.update.threads = 2;
    options.update.max_grad_norm = mode == policy::UpdateMode::kEager ? 0 : 1e6;
    options.update.slice_elements = 512;
    SetSteps(options, 6);
    return options;
  }
  static void SetSteps(LocalJobOptions& options, uint64_t steps) {
    options.steps = options.update.schedule.total_steps = steps;
  }

  TempFolder folder_;
};

double RelativeDistance(const std::vector<float>& a,
                        const std::vector<float>& b) {
  double distance = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    distance += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    size += double{b[i]} * b[i];
  }
  return std::sqrt(distance / size);
}

TEST_F(LocalJobTest, AllUpdateModesAgreeBitwiseWhereNothingIsClipped) {
  ASSERT_OK_AND_ASSIGN(const LocalJobResult deferred,
                       RunLocalJob(Options(policy::UpdateMode::kDeferred)));
  ASSERT_OK_AND_ASSIGN(const LocalJobResult speculative,
                       RunLocalJob(Options(policy::UpdateMode::kSpeculative)));
  ASSERT_OK_AND_ASSIGN(const LocalJobResult eager,
                       RunLocalJob(Options(policy::UpdateMode::kEager)));
  EXPECT_EQ(deferred.master, speculative.master);
  EXPECT_EQ(deferred.master, eager.master);
  ASSERT_EQ(speculative.steps.size(), 6u);
  for (size_t t = 0; t < 6; ++t) {
    EXPECT_TRUE(speculative.steps[t].speculated);
    EXPECT_EQ(speculative.steps[t].loss, deferred.steps[t].loss);
    EXPECT_EQ(speculative.steps[t].grad_norm, deferred.steps[t].grad_norm);
  }
}

// At a usual rate for all parameters. At larger ones, a difference of one unit
// of float32 anywhere moves BF16 weights and gradients across rounding
// boundaries, and grows whatever it came from: at 1e-4, a learning rate that
// differs by 1e-7 of itself moves this model's weights by 5e-5 in 100 steps.
// (The engine's own test has gradients that don't depend on the weights.)
TEST_F(LocalJobTest, SpeculationIsWithinAMillionthAfterManyClippedSteps) {
  LocalJobOptions options = Options(policy::UpdateMode::kDeferred);
  SetSteps(options, 100);
  ASSERT_OK_AND_ASSIGN(const LocalJobResult free, RunLocalJob(options));
  // The median norm: about half of the steps are clipped.
  std::vector<double> norms;
  for (const hostd::StepResult& step : free.steps) {
    norms.push_back(step.grad_norm);
  }
  std::nth_element(norms.begin(), norms.begin() + 50, norms.end());
  options.update.max_grad_norm = norms[50];
  ASSERT_OK_AND_ASSIGN(const LocalJobResult deferred, RunLocalJob(options));
  options.problem.update_mode = policy::UpdateMode::kSpeculative;
  options.update.clipped_to_defer = hostd::kPredictorSteps + 1;
  ASSERT_OK_AND_ASSIGN(const LocalJobResult speculative, RunLocalJob(options));
  int corrected = 0, clipped = 0;
  for (const hostd::StepResult& step : speculative.steps) {
    clipped += step.clip_coefficient < 1;
    corrected += step.clip_coefficient < 1 && step.speculated;
  }
  EXPECT_GE(clipped, 20);
  EXPECT_EQ(corrected, clipped);
  const double distance = RelativeDistance(speculative.master, deferred.master);
  RecordProperty("relative_distance", std::to_string(distance * 1e9) + "e-9");
  EXPECT_LE(distance, 1e-6);
  EXPECT_FALSE(speculative.master == deferred.master);
}

TEST_F(LocalJobTest, FailureOfTheEngineEndsTheJob) {
  LocalJobOptions options = Options(policy::UpdateMode::kEager);
  options.update.lr = 1e38;  // leaves the finite range
  EXPECT_THAT(
      RunLocalJob(options),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("step ")));
}

}  // namespace
}  // namespace slidedp::testing
