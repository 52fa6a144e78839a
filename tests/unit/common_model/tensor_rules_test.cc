#include "common/model/tensor_rules.h"

#include <algorithm>

#include "common/model/shapes.h"
#include "tests/testing/status_matchers.h"

namespace slidedp::model {
namespace {

using ::slidedp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

StateLayout Layout(bool tied = false) {
  Shape shape = *FindShape("qwen3-8b");
  shape.layers = 2;
  shape.tied = tied;
  return MakeStateLayout(*ParseModelConfig(ConfigJson(shape), "config.json"));
}

const Tensor& Named(const StateLayout& layout, absl::string_view name) {
  for (const Unit& unit : layout.units) {
    for (const Tensor& tensor : unit.tensors) {
      if (tensor.name == name) return tensor;
    }
  }
  ADD_FAILURE() << "no tensor " << std::string(name);
  return layout.units[0].tensors[0];
}

TEST(TensorRulesTest, PatternsAreGlobsOverTheWholeName) {
  EXPECT_TRUE(MatchesPattern("", ""));
  EXPECT_FALSE(MatchesPattern("", "a"));
  EXPECT_TRUE(MatchesPattern("*", ""));
  EXPECT_TRUE(MatchesPattern("model.layers.1.*", "model.layers.1.mlp.up"));
  EXPECT_FALSE(MatchesPattern("model.layers.1.*", "model.layers.10.mlp.up"));
  EXPECT_FALSE(MatchesPattern("layers", "model.layers.0"));
  EXPECT_TRUE(
      MatchesPattern("*norm*", "model.layers.0.input_layernorm.weight"));
  EXPECT_TRUE(MatchesPattern("a?c", "abc"));
  EXPECT_FALSE(MatchesPattern("a?c", "ac"));
  EXPECT_TRUE(MatchesPattern("*a*b*c", "xxaybbzc"));
  EXPECT_FALSE(MatchesPattern("*a*b*c", "xxaybbzd"));
  EXPECT_TRUE(MatchesPattern("a**", "a"));
  EXPECT_FALSE(MatchesPattern("[a]", "a"));
}

TEST(TensorRulesTest, HostilePatternTakesNoLongerThanItsLength) {
  std::string pattern;
  for (int i = 0; i < 120; ++i) pattern += "a*";
  EXPECT_FALSE(MatchesPattern(pattern + "b", std::string(4000, 'a')));
}

TEST(TensorRulesTest, NoRulesChangeNothing) {
  StateLayout layout = Layout();
  const uint64_t hash = layout.hash;
  ASSERT_OK(ApplyRules({}, layout));
  EXPECT_EQ(layout.hash, hash);
  EXPECT_EQ(layout.frozen_parameters, 0);
  EXPECT_FALSE(layout.units[0].frozen());
}

// transformers' default (Trainer.get_decay_parameter_names): no decay for names
// with bias, layernorm, rmsnorm, or norm as a part of its own.
TEST(TensorRulesTest, DefaultDecayIsTransformersRule) {
  for (const Unit& unit : Layout().units) {
    for (const Tensor& tensor : unit.tensors) {
      const bool spared = MatchesPattern("*bias*", tensor.name) ||
                          MatchesPattern("*layernorm*", tensor.name) ||
                          MatchesPattern("*_norm.*", tensor.name) ||
                          MatchesPattern("*.norm.*", tensor.name);
      EXPECT_EQ(tensor.decay, !spared) << tensor.name;
    }
  }
}

TEST(TensorRulesTest, NoDecayReplacesTheDefault) {
  StateLayout layout = Layout();
  const uint64_t hash = layout.hash;
  TensorRules rules;
  rules.no_decay = {"model.embed_tokens.*"};
  ASSERT_OK(ApplyRules(rules, layout));
  EXPECT_FALSE(Named(layout, "model.embed_tokens.weight").decay);
  EXPECT_TRUE(Named(layout, "model.norm.weight").decay);
  EXPECT_NE(layout.hash, hash);
  rules.no_decay.emplace();
  ASSERT_OK(ApplyRules(rules, layout));
  EXPECT_TRUE(Named(layout, "model.embed_tokens.weight").decay);
}

TEST(TensorRulesTest, FreezesTensorsAndWholeUnits) {
  StateLayout layout = Layout();
  const uint64_t hash = layout.hash;
  ASSERT_OK(ApplyRules({{}, {"model.layers.0.*", "*.q_norm.weight"}}, layout));
  EXPECT_NE(layout.hash, hash);
  EXPECT_TRUE(layout.units[1].frozen());
  EXPECT_FALSE(layout.units[2].frozen());
  EXPECT_TRUE(Named(layout, "model.layers.1.self_attn.q_norm.weight").frozen);
  uint64_t expected =
      Named(layout, "model.layers.1.self_attn.q_norm.weight").count;
  for (const Tensor& tensor : layout.units[1].tensors) expected += tensor.count;
  EXPECT_EQ(layout.frozen_parameters, expected);
}

TEST(TensorRulesTest, PatternWithoutTensorIsNamed) {
  StateLayout layout = Layout();
  EXPECT_THAT(ApplyRules({{}, {"layers.0.*"}}, layout),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("freeze"), HasSubstr("layers.0.*"),
                             HasSubstr("model.layers.0."))));
  TensorRules rules;
  rules.no_decay = {"*bais"};
  EXPECT_THAT(ApplyRules(rules, layout),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("no_decay"), HasSubstr("*bais"))));
}

TEST(TensorRulesTest, TiedHeadGoesByTheEmbeddingsName) {
  StateLayout layout = Layout(/*tied=*/true);
  EXPECT_THAT(ApplyRules({{}, {"lm_head.*"}}, layout),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("model.embed_tokens.weight")));
}

TEST(TensorRulesTest, SomethingMustBeTrained) {
  StateLayout layout = Layout();
  EXPECT_THAT(ApplyRules({{}, {"*"}}, layout),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("nothing to be trained")));
}

}  // namespace
}  // namespace slidedp::model
