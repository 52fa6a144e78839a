// Jobs of a tiny model for properties of the whole pipeline.
#pragma once

#include <cmath>
#include <string>

#include "gtest/gtest.h"
#include "tests/local_job/local_job.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"
#include "tests/testing/tiny_model.h"

namespace slidedp::step {

using testing::LocalJobOptions;
using testing::LocalJobResult;
using testing::RunLocalJob;

inline constexpr double kLr = 1e-3;

// A gradient element that another summation order moves across a BF16 rounding
// boundary changes by 2^-8 of its value; Adam turns that into at most about
// 2^-8 of lr a step. Five steps: 2e-5. Elements whose gradient is rounding
// noise may move by up to lr; there are none in these models (eps is far
// below).
inline constexpr double kMasterBound = 2e-5;
inline constexpr double kLossBound = 2e-5;  // relative

class TrainerTest : public ::testing::Test {
 protected:
  LocalJobOptions Options(bool tied) {
    testing::TinyModelOptions model;
    model.tied = tied;
    model.layers = 3;
    model.hidden = 48;
    model.intermediate = 80;
    model.vocab = 101;
    const std::string folder = folder_.Sub(tied ? "tied" : "untied");
    testing::WriteTinyModel(folder, model);
    testing::TokenDatasetOptions data;
    data.vocab = model.vocab;
    data.tokens = 40 * 37;
    data.mask = testing::TokenDatasetOptions::Mask::kRandomHalf;
    const std::string file = folder_.Sub("data.safetensors");
    testing::WriteTokenDataset(file, data);

    LocalJobOptions options;
    options.model = folder;
    options.data = file;
    options.problem.sequence_length = 37;
    options.problem.batch_size = 6;
    options.problem.micro_batch_size = 1;
    options.problem.ranks = 1;
    options.problem.compute_threads = 1;
    options.problem.update_threads = 2;
    options.update.lr = kLr;
    options.update.beta1 = 0.9;
    options.update.beta2 = 0.95;
    options.update.eps = 1e-8;
    options.update.weight_decay = 0.1;
    options.update.schedule.kind = policy::LrScheduleKind::kConstant;
    options.update.schedule.total_steps = 5;
    options.update.max_grad_norm = 1.0;
    options.update.threads = 2;
    options.steps = 5;
    options.seed = 7;
    return options;
  }

  static void SetEager(LocalJobOptions& options) {
    options.problem.clipping = false;
    options.update.max_grad_norm = 0;
  }

  static void ExpectNear(const LocalJobResult& a, const LocalJobResult& b,
                         double master_bound, double loss_bound) {
    ASSERT_EQ(a.master.size(), b.master.size());
    double worst = 0;
    for (size_t i = 0; i < a.master.size(); ++i) {
      const double d = std::abs(a.master[i] - b.master[i]);
      if (!(d <= worst)) worst = d;
    }
    EXPECT_LE(worst, master_bound);
    ASSERT_EQ(a.steps.size(), b.steps.size());
    for (size_t t = 0; t < a.steps.size(); ++t) {
      EXPECT_NEAR(a.steps[t].loss, b.steps[t].loss,
                  loss_bound * a.steps[t].loss)
          << "step " << t;
      EXPECT_EQ(a.steps[t].valid_tokens, b.steps[t].valid_tokens);
    }
  }
  static void ExpectSameBits(const LocalJobResult& a, const LocalJobResult& b) {
    ExpectNear(a, b, 0, 0);
    for (size_t t = 0; t < a.steps.size(); ++t) {
      EXPECT_EQ(a.steps[t].grad_norm, b.steps[t].grad_norm) << "step " << t;
    }
  }

  testing::TempFolder folder_;
};

}  // namespace slidedp::step
