// Frozen tensors behave as parameters without requires_grad do in PyTorch: they
// stay to the bit, they have no part in the gradient's norm, and what is
// trained does not notice.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/bf16.h"
#include "tests/unit/worker_step/trainer_fixture.h"

namespace slidedp::step {
namespace {

using Patterns = std::vector<std::string>;

class FreezeTest : public TrainerTest {
 protected:
  LocalJobOptions FreezeOptions(bool tied) {
    LocalJobOptions options = Options(tied);
    options.update.max_grad_norm = 1e9;
    return options;
  }

  // Before any update.
  LocalJobResult Start(LocalJobOptions options) {
    options.steps = 1;
    options.apply_updates = false;
    return *RunLocalJob(options);
  }

  // The norm of what is trained, from gradients as ranks drain them.
  static double NormOf(const model::StateLayout& layout,
                       const std::vector<std::vector<float>>& gradients) {
    double sum = 0;
    for (size_t u = 0; u < layout.units.size(); ++u) {
      for (const model::Tensor& tensor : layout.units[u].tensors) {
        if (tensor.frozen) continue;
        for (uint64_t i = 0; i < tensor.count; ++i) {
          const double g =
              Bf16ToFloat(FloatToBf16Even(gradients[u][tensor.offset + i]));
          sum += g * g;
        }
      }
    }
    return std::sqrt(sum);
  }

  void ExpectFrozen(bool tied, const Patterns& freeze) {
    SCOPED_TRACE(absl::StrCat("tied ", tied, ": ", absl::StrJoin(freeze, " ")));
    LocalJobOptions options = FreezeOptions(tied);
    options.steps = 1;
    std::vector<std::vector<float>> gradients;
    LocalJobOptions free = options;
    free.hooks.on_gradient = [&](int unit, const float* data, uint64_t count) {
      gradients.resize(std::max<size_t>(gradients.size(), unit + 1));
      gradients[unit].assign(data, data + count);
    };
    ASSERT_OK_AND_ASSIGN(const LocalJobResult all, RunLocalJob(free));
    const LocalJobResult start = Start(options);

    options.rules.freeze = freeze;
    ASSERT_OK_AND_ASSIGN(const LocalJobResult once, RunLocalJob(options));
    EXPECT_EQ(once.steps[0].loss, all.steps[0].loss);
    EXPECT_NEAR(once.steps[0].grad_norm, NormOf(once.layout, gradients),
                1e-12 * once.steps[0].grad_norm);
    options.steps = 3;
    options.update.schedule.total_steps = 3;
    options.problem.ranks = 2;
    options.problem.grads = policy::GradRoute::kGpuSharded;
    options.rehearse = true;
    ASSERT_OK_AND_ASSIGN(const LocalJobResult thrice, RunLocalJob(options));
    SetEager(options);
    ASSERT_OK_AND_ASSIGN(const LocalJobResult eager, RunLocalJob(options));
    ExpectNear(thrice, eager, 0, 0);

    uint64_t moved = 0;
    for (const model::Unit& unit : once.layout.units) {
      for (const model::Tensor& tensor : unit.tensors) {
        for (uint64_t i = 0; i < tensor.count; ++i) {
          const uint64_t at = unit.plane_offset + tensor.offset + i;
          const float before = start.master[at];
          if (tensor.frozen) {
            ASSERT_EQ(once.master[at], before) << tensor.name;
            ASSERT_EQ(thrice.master[at], before) << tensor.name;
          } else {
            ASSERT_EQ(once.master[at], all.master[at]) << tensor.name;
            moved += thrice.master[at] != before;
          }
        }
      }
    }
    EXPECT_GT(moved, 0);
  }
};

TEST_F(FreezeTest, WholeUnits) {
  ExpectFrozen(false, {"model.embed_tokens.*"});
  ExpectFrozen(false, {"model.layers.1.*"});
  ExpectFrozen(false, {"model.norm.weight", "lm_head.weight"});
}

// Below the last trained unit the backward pass ends.
TEST_F(FreezeTest, EverythingBelowALayer) {
  ExpectFrozen(false, {"model.embed_tokens.*", "model.layers.0.*"});
  ExpectFrozen(false, {"model.embed_tokens.*", "model.layers.*"});
  ExpectFrozen(true, {"model.embed_tokens.*", "model.norm.weight",
                      "model.layers.0.*", "model.layers.1.*"});
}

TEST_F(FreezeTest, PartsOfUnits) {
  ExpectFrozen(false, {"*self_attn*"});
  ExpectFrozen(false, {"*.q_proj.*", "*.up_proj.*", "*norm*"});
  ExpectFrozen(true, {"model.embed_tokens.*"});
  ExpectFrozen(true, {"model.norm.weight", "*mlp*"});
}

TEST_F(FreezeTest, DecayFollowsNoDecay) {
  LocalJobOptions options = FreezeOptions(false);
  options.steps = 1;
  options.update.schedule.total_steps = 1;
  options.update.weight_decay = 10;
  const LocalJobResult start = Start(options);
  ASSERT_OK_AND_ASSIGN(const LocalJobResult usual, RunLocalJob(options));
  options.rules.no_decay = {"*q_proj*"};
  ASSERT_OK_AND_ASSIGN(const LocalJobResult mine, RunLocalJob(options));
  for (const model::Unit& unit : mine.layout.units) {
    for (const model::Tensor& tensor : unit.tensors) {
      const bool spared = tensor.role == model::Role::kQ;
      const bool norm = tensor.name.find("norm") != std::string::npos;
      for (uint64_t i = 0; i < tensor.count; ++i) {
        const uint64_t at = unit.plane_offset + tensor.offset + i;
        // lr * decay = 1 % of the value, in one of the two.
        const double difference =
            double{usual.master[at]} - double{mine.master[at]};
        const double decay = 0.01 * start.master[at];
        ASSERT_NEAR(difference,
                    norm     ? decay
                    : spared ? -decay
                             : 0,
                    1e-7)
            << tensor.name;
      }
    }
  }
}

}  // namespace
}  // namespace slidedp::step
