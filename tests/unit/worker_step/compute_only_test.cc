// A Trainer without a daemon: what benchmarks of compute alone run.
#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "tests/unit/worker_step/trainer_fixture.h"

namespace slidedp::step {
namespace {

using ::testing::HasSubstr;
using testing::StatusIs;

class ComputeOnlyTest : public ::testing::Test {
 protected:
  ComputeOnlyTest() {
    testing::TinyModelOptions model;
    model.layers = 3;
    config_ = testing::TinyConfig(model);
    layout_ = model::MakeStateLayout(config_);
    problem_.config = config_;
    problem_.sequence_length = 20;
    problem_.batch_size = 4;
    problem_.micro_batch_size = 2;
    problem_.window_slots = 3;
  }

  absl::StatusOr<std::unique_ptr<Trainer>> Make(Hooks hooks = {}) {
    auto plan = policy::MakePlan(problem_);
    if (!plan.ok()) return plan.status();
    plan_ = *plan;
    inputs_.device = device_.get();
    inputs_.ops = ops_.get();
    inputs_.config = &config_;
    inputs_.layout = &layout_;
    inputs_.plan = &plan_;
    inputs_.seed = 3;
    inputs_.compute_only = true;
    inputs_.fill_weights = [this](int unit, bf16* weights) {
      // Small values of both signs; they need not be the same for all units.
      for (uint64_t i = 0; i < layout_.units[unit].count; ++i) {
        const auto n = static_cast<int>((i * 2654435761u + unit) >> 3 & 255);
        weights[i] = FloatToBf16Even((n - 128) * 1e-3f);
      }
      return absl::OkStatus();
    };
    return Trainer::Create(inputs_, std::move(hooks));
  }

  std::unique_ptr<device::Device> device_ = device::NewCpuDevice({});
  std::unique_ptr<ops::Ops> ops_ = ops::NewCpuOps(2);
  model::ModelConfig config_;
  model::StateLayout layout_;
  policy::Problem problem_;
  policy::Plan plan_;
  TrainerInputs inputs_;
};

TEST_F(ComputeOnlyTest, StepsRunWithoutSegmentsAndAreTimed) {
  ASSERT_OK_AND_ASSIGN(auto trainer, Make());
  ASSERT_OK(trainer->Run(0, 3));
  ASSERT_OK(trainer->Run(3, 1));
  const std::vector<ComputeTimes>& times = trainer->compute_times();
  ASSERT_EQ(times.size(), 4u);
  for (size_t t = 0; t < times.size(); ++t) {
    EXPECT_GT(times[t].busy_ns, 0);
    EXPECT_GE(times[t].stall_ns, 0);
    if (t > 0) {
      EXPECT_GT(times[t].end_ns, times[t - 1].end_ns);
    }
  }
}

// Each micro-batch of each layer goes and comes once a step.
TEST_F(ComputeOnlyTest, OffloadIsALaneOfItsOwn) {
  problem_.keep = {policy::kKeepAll, 0, policy::kKeepAll};
  problem_.offload_permille = {1000, 1000, 0};
  trace::Recorder recorder(1024);
  inputs_.recorder = &recorder;
  ASSERT_OK_AND_ASSIGN(auto trainer, Make());
  ASSERT_OK(trainer->Run(0, 2));
  std::map<std::string, int> spans;
  std::map<int, int> units;
  for (const trace::Span& span : recorder.Snapshot()) {
    EXPECT_LE(span.begin_ns, span.end_ns);
    if (span.step != 1) continue;
    ++spans[span.name];
    if (span.lane == trace::Lane::kActivation) ++units[span.unit];
  }
  // Two micro-batches; two layers' inputs and one's other parts.
  EXPECT_EQ(spans["offload"], 6);
  EXPECT_EQ(spans["reload"], 6);
  EXPECT_EQ(units[layout_.decoder_unit(0)], 8);
  EXPECT_EQ(units[layout_.decoder_unit(1)], 4);
  EXPECT_EQ(units.size(), 2u);
  // Layer 0 waits for its slots and for layer 1's inputs.
  EXPECT_EQ(spans["wait for a slot"], 2);
  EXPECT_EQ(spans["wait for a reload"], 4);
}

TEST_F(ComputeOnlyTest, StepsDifferOnlyByTheirTokens) {
  using Gradients = std::map<int, std::vector<float>>;
  std::vector<Gradients> steps;
  Hooks hooks;
  hooks.on_gradient = [&](int unit, const float* gradient, uint64_t count) {
    if (steps.empty() || steps.back().contains(unit)) steps.emplace_back();
    steps.back()[unit].assign(gradient, gradient + count);
  };
  // The same batch again.
  data::StepBatch first;
  hooks.on_batch = [&](uint64_t step, data::StepBatch& batch) {
    if (step == 0) first = batch;
    if (step == 2) batch = first;
  };
  ASSERT_OK_AND_ASSIGN(auto trainer, Make(hooks));
  ASSERT_OK(trainer->Run(0, 3));
  ASSERT_EQ(steps.size(), 3u);
  EXPECT_EQ(steps[0], steps[2]);
  EXPECT_NE(steps[0], steps[1]);
  for (const auto& [unit, gradient] : steps[0]) {
    EXPECT_TRUE(std::any_of(gradient.begin(), gradient.end(),
                            [](float g) { return g != 0; }))
        << "unit " << unit;
  }
  EXPECT_EQ(steps[0].size(), layout_.units.size());
}

TEST_F(ComputeOnlyTest, UnitsThatCannotAllStayAreRefused) {
  problem_.window_slots = 2;
  EXPECT_THAT(Make().status(), StatusIs(absl::StatusCode::kInvalidArgument,
                                        HasSubstr("3 window slots")));
}

}  // namespace
}  // namespace slidedp::step
