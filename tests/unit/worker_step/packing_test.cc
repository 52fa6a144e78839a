// Packed documents through the whole pipeline: the loss and the gradients of
// each alone.
#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/unit/worker_step/trainer_fixture.h"
#include "worker/data/dataset.h"

namespace slidedp::step {
namespace {

using Gradients = std::vector<std::vector<float>>;  // by unit

struct Outcome {
  double loss;
  uint64_t labels;
  Gradients gradients;
};

class PackingTest : public TrainerTest {
 protected:
  // Two fifths of the documents are longer than a sequence of 37.
  LocalJobOptions PackedOptions(const testing::TinyModelOptions& model) {
    LocalJobOptions options = Options(false);
    options.model = folder_.Sub("packed-model");
    testing::WriteTinyModel(options.model, model);
    testing::TokenDatasetOptions data;
    data.vocab = model.vocab;
    data.tokens = 30 * 25;
    data.documents = 30;
    data.stream = false;
    data.mask = testing::TokenDatasetOptions::Mask::kPrompt;
    data.masked_documents = 4;
    options.data = folder_.Sub("documents.safetensors");
    testing::WriteTokenDataset(options.data, data);
    options.sequences.packing = true;
    options.steps = 1;
    vocab_ = model.vocab;
    return options;
  }

  // All of the data in one step.
  void TakeAll(LocalJobOptions& options) {
    const auto dataset =
        data::Dataset::Open(options.data, options.problem.sequence_length,
                            vocab_, options.sequences);
    ASSERT_OK(dataset.status());
    options.problem.batch_size = static_cast<int64_t>(dataset->sequences());
  }

  static Outcome Run(LocalJobOptions options) {
    Outcome outcome = {};
    options.hooks.on_gradient = [&](int unit, const float* gradient,
                                    uint64_t count) {
      outcome.gradients.resize(
          std::max<size_t>(outcome.gradients.size(), unit + 1));
      outcome.gradients[unit].assign(gradient, gradient + count);
    };
    const auto result = RunLocalJob(options);
    EXPECT_OK(result.status());
    if (!result.ok()) return outcome;
    outcome.loss = result->steps.at(0).loss;
    outcome.labels = result->steps.at(0).valid_tokens;
    return outcome;
  }

  // Largest difference of a unit's gradients against their largest element.
  static double Difference(const Gradients& a, const Gradients& b) {
    double worst = a.size() == b.size() ? 0 : INFINITY;
    for (size_t u = 0; u < std::min(a.size(), b.size()); ++u) {
      double largest = 0, difference = 0;
      for (size_t i = 0; i < a[u].size(); ++i) {
        largest = std::max<double>(largest, std::abs(a[u][i]));
        const double d = std::abs(double{a[u][i]} - double{b[u][i]});
        if (!(d <= difference)) difference = d;
      }
      EXPECT_GT(largest, 0) << "unit " << u;
      worst = std::max(worst, difference / largest);
    }
    return worst;
  }

  int64_t vocab_ = 0;
};

TEST_F(PackingTest, LossAndGradientsAreThoseOfEachDocumentAlone) {
  testing::TinyModelOptions model;
  model.hidden = 48;
  model.intermediate = 80;
  model.vocab = 101;
  for (const model::Family family :
       {model::Family::kQwen3, model::Family::kQwen2, model::Family::kLlama,
        model::Family::kMistral}) {
    model.family = family;
    model.tied = family == model::Family::kQwen2;
    model.window = family == model::Family::kMistral ? 9 : 0;
    model.llama3_rope = family == model::Family::kLlama;
    LocalJobOptions packed = PackedOptions(model);
    TakeAll(packed);
    LocalJobOptions alone = packed;
    alone.sequences.packing = false;
    TakeAll(alone);
    ASSERT_LT(packed.problem.batch_size, alone.problem.batch_size);
    const Outcome want = Run(alone);
    for (const int64_t micro_batch : {1, 4}) {
      packed.problem.micro_batch_size = micro_batch;
      const Outcome got = Run(packed);
      EXPECT_EQ(got.labels, want.labels);
      EXPECT_NEAR(got.loss, want.loss, 1e-5 * want.loss);
      EXPECT_LE(Difference(want.gradients, got.gradients), 1e-5);
    }
    // The comparison sees what it is there to see.
    packed.hooks.on_batch = [&](uint64_t, data::StepBatch& batch) {
      const auto length = static_cast<int32_t>(packed.problem.sequence_length);
      for (size_t row = 0; row < batch.first_rows.size(); ++row) {
        batch.first_rows[row] = batch.first_rows[row] / length * length;
      }
    };
    EXPECT_GT(Difference(want.gradients, Run(packed).gradients), 1e-2);
  }
}

TEST_F(PackingTest, AnyCutGivesTheSameUpdateWithinTheBound) {
  testing::TinyModelOptions model;
  model.vocab = 101;
  LocalJobOptions options = PackedOptions(model);
  options.problem.batch_size = 8;
  options.steps = 3;
  ASSERT_OK_AND_ASSIGN(const LocalJobResult reference, RunLocalJob(options));
  for (const auto& [ranks, micro_batch] :
       {std::pair{1, 3}, {2, 1}, {2, 4}, {4, 1}}) {
    options.problem.ranks = ranks;
    options.problem.micro_batch_size = micro_batch;
    ASSERT_OK_AND_ASSIGN(const LocalJobResult result, RunLocalJob(options));
    SCOPED_TRACE(absl::StrCat(ranks, " ranks, micro-batch ", micro_batch));
    ExpectNear(reference, result, kMasterBound, kLossBound);
  }
}

TEST_F(PackingTest, RehearsalChangesNoBit) {
  LocalJobOptions options = PackedOptions({});
  options.problem.batch_size = 4;
  options.problem.micro_batch_size = 2;
  options.steps = 2;
  ASSERT_OK_AND_ASSIGN(const LocalJobResult want, RunLocalJob(options));
  options.rehearse = true;
  ASSERT_OK_AND_ASSIGN(const LocalJobResult got, RunLocalJob(options));
  ExpectSameBits(want, got);
}

// What tokens without weight say reaches neither loss nor gradients.
TEST_F(PackingTest, DocumentsWithoutLabelAndPaddingContributeNothing) {
  for (const bool packing : {true, false}) {
    LocalJobOptions options = PackedOptions({});
    options.sequences.packing = packing;
    TakeAll(options);
    const Outcome want = Run(options);
    uint64_t changed = 0;
    options.hooks.on_batch = [&](uint64_t, data::StepBatch& batch) {
      const auto length = static_cast<size_t>(options.problem.sequence_length);
      // Not packed, what follows the last label of a sequence is its document's
      // last token and the padding.
      for (size_t begin = 0; begin < batch.ids.size();) {
        size_t end = begin + 1;
        while (end % length != 0 &&
               (!packing || batch.first_rows[end] == batch.first_rows[begin])) {
          ++end;
        }
        size_t last = end;  // one after the last label
        while (last > begin && batch.labels[last - 1] < 0) --last;
        // The last label's token is not read at its own position.
        if (last == begin || !packing) {
          for (size_t t = last; t < end; ++t, ++changed) {
            batch.ids[t] = (batch.ids[t] + 17) % 256;
          }
        }
        begin = end;
      }
    };
    const Outcome got = Run(options);
    EXPECT_GT(changed, 50u);
    EXPECT_EQ(got.loss, want.loss);
    EXPECT_EQ(got.labels, want.labels);
    EXPECT_EQ(Difference(want.gradients, got.gradients), 0);
  }
}

TEST_F(PackingTest, AStepWithoutLabelsHasNoGradient) {
  LocalJobOptions options = PackedOptions({});
  options.problem.batch_size = 2;
  options.hooks.on_batch = [](uint64_t, data::StepBatch& batch) {
    std::fill(batch.labels.begin(), batch.labels.end(), -1);
    batch.valid_tokens = 0;
  };
  options.apply_updates = false;
  Gradients gradients;
  options.hooks.on_gradient = [&](int, const float* gradient, uint64_t count) {
    gradients.emplace_back(gradient, gradient + count);
  };
  ASSERT_OK(RunLocalJob(options).status());
  ASSERT_EQ(gradients.size(), 4u);
  for (const std::vector<float>& gradient : gradients) {
    EXPECT_TRUE(std::all_of(gradient.begin(), gradient.end(),
                            [](float g) { return g == 0; }));
  }
}

}  // namespace
}  // namespace slidedp::step
