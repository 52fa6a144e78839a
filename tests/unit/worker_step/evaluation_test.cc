// Evaluations through the trainer of a job: right numbers, and training does
// not notice.
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/unit/worker_step/trainer_fixture.h"
#include "worker/data/dataset.h"

namespace slidedp::step {
namespace {

using ::testing::ElementsAre;

std::vector<uint64_t> Steps(const LocalJobResult& result) {
  std::vector<uint64_t> steps;
  for (const auto& [step, loss] : result.evaluations) steps.push_back(step);
  return steps;
}

class EvaluationTest : public TrainerTest {
 protected:
  // Of all 40 sequences of the training data.
  LocalJobOptions EvalOptions(bool tied) {
    LocalJobOptions options = Options(tied);
    options.eval_data = options.data;
    options.eval_sequences = 40;
    return options;
  }
};

// The loss of a step over all sequences, before its update.
TEST_F(EvaluationTest, EqualsTheLossOfAStepOverTheSameSequences) {
  for (bool tied : {false, true}) {
    LocalJobOptions whole = Options(tied);
    whole.problem.batch_size = 40;
    whole.problem.micro_batch_size = 4;
    whole.steps = whole.update.schedule.total_steps = 1;
    ASSERT_OK_AND_ASSIGN(const LocalJobResult step, RunLocalJob(whole));
    for (int ranks : {1, 2, 3}) {
      SCOPED_TRACE(absl::StrCat("tied ", tied, " ranks ", ranks));
      LocalJobOptions options = EvalOptions(tied);
      options.problem.ranks = ranks;
      options.problem.micro_batch_size = ranks == 3 ? 2 : 1;
      options.problem.window_slots = ranks == 2 ? 1 : 3;
      options.steps = options.update.schedule.total_steps = 1;
      ASSERT_OK_AND_ASSIGN(const LocalJobResult result, RunLocalJob(options));
      ASSERT_THAT(Steps(result), ElementsAre(0, 1));
      EXPECT_NEAR(result.evaluations[0].second, step.steps[0].loss,
                  1e-6 * step.steps[0].loss);
      EXPECT_LT(result.evaluations[1].second, result.evaluations[0].second);
    }
  }
}

TEST_F(EvaluationTest, ChangesNoBitOfTraining) {
  for (int ranks : {1, 2}) {
    for (bool eager : {false, true}) {
      LocalJobOptions plain = Options(ranks == 2);
      plain.problem.ranks = ranks;
      if (eager) SetEager(plain);
      ASSERT_OK_AND_ASSIGN(const LocalJobResult reference, RunLocalJob(plain));
      LocalJobOptions options = plain;
      options.eval_data = options.data;
      options.eval_sequences = 5;  // the last round is not full
      options.eval_every_steps = 2;
      options.problem.window_slots = ranks;
      options.rehearse = true;
      ASSERT_OK_AND_ASSIGN(const LocalJobResult result, RunLocalJob(options));
      EXPECT_THAT(Steps(result), ElementsAre(0, 2, 4, 5));
      ExpectSameBits(reference, result);
    }
  }
}

// Packed as the job is; its own documents are fewer and longer.
TEST_F(EvaluationTest, PackedIsTheLossOfEachDocumentAlone) {
  LocalJobOptions options = Options(false);
  testing::TokenDatasetOptions held_out;
  held_out.vocab = 101;
  held_out.tokens = 60 * 12;
  held_out.documents = 60;
  held_out.stream = false;
  options.eval_data = folder_.Sub("held-out.safetensors");
  testing::WriteTokenDataset(options.eval_data, held_out);
  options.steps = options.update.schedule.total_steps = 1;
  const auto open = [&](const std::string& path) {
    return data::Dataset::Open(path, options.problem.sequence_length,
                               held_out.vocab, options.sequences);
  };
  ASSERT_OK_AND_ASSIGN(const data::Dataset apart, open(options.eval_data));
  options.eval_sequences = apart.sequences();
  ASSERT_OK_AND_ASSIGN(const LocalJobResult alone, RunLocalJob(options));
  options.sequences.packing = true;
  ASSERT_OK_AND_ASSIGN(const data::Dataset together, open(options.eval_data));
  ASSERT_OK_AND_ASSIGN(const data::Dataset trained, open(options.data));
  ASSERT_LT(2 * together.sequences(), apart.sequences());
  ASSERT_GT(together.documents_per_sequence(),
            trained.documents_per_sequence());
  options.eval_sequences = together.sequences();
  for (int ranks : {1, 2}) {
    options.problem.ranks = ranks;
    options.rehearse = ranks == 2;
    ASSERT_OK_AND_ASSIGN(const LocalJobResult packed, RunLocalJob(options));
    ASSERT_THAT(Steps(packed), ElementsAre(0, 1));
    EXPECT_NEAR(packed.evaluations[0].second, alone.evaluations[0].second,
                1e-5 * alone.evaluations[0].second);
  }
}

TEST_F(EvaluationTest, SeesThePresentParameters) {
  LocalJobOptions options = EvalOptions(false);
  options.eval_every_steps = 1;
  ASSERT_OK_AND_ASSIGN(const LocalJobResult result, RunLocalJob(options));
  // What a job that ends there says of its last parameters.
  for (uint64_t steps : {1, 3}) {
    LocalJobOptions part = EvalOptions(false);
    part.steps = steps;
    ASSERT_OK_AND_ASSIGN(const LocalJobResult shorter, RunLocalJob(part));
    EXPECT_EQ(shorter.evaluations.back(), result.evaluations[steps]);
  }
}

TEST_F(EvaluationTest, MayEndTheJobAtAStep) {
  LocalJobOptions options = EvalOptions(false);
  options.problem.ranks = 2;
  options.eval_every_steps = 2;
  options.stop_at_evaluation = 2;
  ASSERT_OK_AND_ASSIGN(const LocalJobResult stopped, RunLocalJob(options));
  EXPECT_THAT(Steps(stopped), ElementsAre(0, 2));
  options.stop_at_evaluation.reset();
  options.steps = 2;
  ASSERT_OK_AND_ASSIGN(const LocalJobResult two, RunLocalJob(options));
  ExpectSameBits(two, stopped);
}

}  // namespace
}  // namespace slidedp::step
