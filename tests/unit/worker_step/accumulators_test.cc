// A gradient depends on nothing that its accumulator held before.
#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/unit/worker_step/poisoned_device.h"
#include "tests/unit/worker_step/trainer_fixture.h"

namespace slidedp::step {
namespace {

class AccumulatorsTest : public TrainerTest {
 protected:
  // Rank 0's gradients, of all steps in their order.
  using Gradients = std::map<int, std::vector<float>>;

  struct Outcome {
    LocalJobResult result;
    Gradients gradients;
  };

  static std::unique_ptr<device::Device> Poisoned(
      std::unique_ptr<device::Device> device) {
    return std::make_unique<PoisonedDevice>(std::move(device), "gradient.");
  }

  static absl::StatusOr<Outcome> Run(LocalJobOptions options, bool poisoned) {
    Outcome outcome;
    options.hooks.on_gradient = [&](int unit, const float* gradient,
                                    uint64_t count) {
      std::vector<float>& all = outcome.gradients[unit];
      all.insert(all.end(), gradient, gradient + count);
    };
    if (poisoned) options.wrap_device = Poisoned;
    auto result = RunLocalJob(options);
    if (!result.ok()) return result.status();
    outcome.result = *std::move(result);
    return outcome;
  }

  void ExpectIndependent(const LocalJobOptions& options) {
    ASSERT_OK_AND_ASSIGN(const Outcome clean, Run(options, false));
    ASSERT_OK_AND_ASSIGN(const Outcome poisoned, Run(options, true));
    ExpectSameBits(clean.result, poisoned.result);
    // Nobody looks at gradients, so they leave bucket by bucket.
    LocalJobOptions buckets = options;
    buckets.wrap_device = Poisoned;
    ASSERT_OK_AND_ASSIGN(const LocalJobResult bucket_wise,
                         RunLocalJob(buckets));
    ExpectSameBits(clean.result, bucket_wise);
    ASSERT_EQ(clean.gradients.size(), clean.result.layout.units.size());
    for (const auto& [unit, gradient] : clean.gradients) {
      ASSERT_EQ(gradient.size(),
                options.steps * clean.result.layout.units[unit].count);
      EXPECT_TRUE(std::all_of(gradient.begin(), gradient.end(),
                              [](float g) { return std::isfinite(g); }))
          << "unit " << unit;
      EXPECT_EQ(gradient, poisoned.gradients.at(unit)) << "unit " << unit;
    }
  }

  LocalJobOptions ShortOptions(bool tied) {
    LocalJobOptions options = Options(tied);
    options.steps = 2;
    options.update.schedule.total_steps = 2;
    options.problem.micro_batch_size = 2;
    return options;
  }
};

TEST_F(AccumulatorsTest, OneRank) {
  struct Case {
    int64_t micro_batch, head_chunk;
    int slots;
  };
  for (bool tied : {false, true}) {
    // Three micro-batches, and one; all of a micro-batch at the head, and
    // parts.
    for (const Case& c : {Case{2, 0, 1}, Case{2, 10, 2}, Case{6, 10, 2}}) {
      SCOPED_TRACE(absl::StrCat("tied ", tied, ", micro-batch ", c.micro_batch,
                                ", head chunk ", c.head_chunk));
      LocalJobOptions options = ShortOptions(tied);
      options.problem.micro_batch_size = c.micro_batch;
      options.problem.head_chunk_tokens = c.head_chunk;
      options.problem.grad_slots = c.slots;
      ExpectIndependent(options);
    }
  }
}

TEST_F(AccumulatorsTest, RanksOnEveryRoute) {
  using policy::GradRoute;
  using policy::ReduceDType;
  for (bool tied : {false, true}) {
    for (const auto& [grads, reduce] :
         {std::pair{GradRoute::kGpuRoot, ReduceDType::kF32},
          {GradRoute::kGpuSharded, ReduceDType::kF32},
          {GradRoute::kGpuSharded, ReduceDType::kBf16},
          {GradRoute::kCpu, ReduceDType::kBf16}}) {
      SCOPED_TRACE(absl::StrCat("tied ", tied, ", ", policy::Name(grads), ", ",
                                policy::Name(reduce)));
      LocalJobOptions options = ShortOptions(tied);
      // Shards that pass the unit's end.
      options.problem.ranks = 3;
      options.problem.grads = grads;
      options.problem.reduce = reduce;
      ExpectIndependent(options);
    }
  }
}

// No label: every product has a zero operand, and still is what is written.
TEST_F(AccumulatorsTest, MicroBatchesWithoutLabels) {
  LocalJobOptions options = ShortOptions(false);
  options.hooks.on_batch = [](uint64_t step, data::StepBatch& batch) {
    if (step == 0) return;
    // All but the last micro-batch.
    std::fill(batch.labels.begin(),
              batch.labels.begin() + batch.labels.size() * 2 / 3, -1);
  };
  ExpectIndependent(options);
}

// What is frozen has no product that would write it.
TEST_F(AccumulatorsTest, FrozenPartsOfAUnitStayOutOfTheNorm) {
  for (bool tied : {false, true}) {
    for (const char* freeze :
         {"*self_attn*", "*mlp*", "model.embed_tokens.*"}) {
      SCOPED_TRACE(absl::StrCat("tied ", tied, ", ", freeze));
      LocalJobOptions options = ShortOptions(tied);
      options.problem.ranks = 2;
      options.rules.freeze = {freeze};
      ASSERT_OK_AND_ASSIGN(const LocalJobResult clean, RunLocalJob(options));
      ASSERT_OK_AND_ASSIGN(const Outcome poisoned, Run(options, true));
      ExpectSameBits(clean, poisoned.result);
      EXPECT_TRUE(std::isfinite(clean.steps[1].grad_norm));
    }
  }
}

}  // namespace
}  // namespace slidedp::step
