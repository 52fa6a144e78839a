#include "common/model/layout.h"

#include <map>
#include <set>
#include <string>

#include "common/base/units.h"
#include "gtest/gtest.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/tiny_model.h"
#include "tests/unit/common_model/published.h"

namespace slidedp::model {
namespace {

using testing::TinyConfig;
using testing::TinyModelOptions;

uint64_t Parameters(const Unit& unit) {
  uint64_t sum = 0;
  for (const Tensor& tensor : unit.tensors) sum += tensor.count;
  return sum;
}

// What must hold of every layout.
void ExpectSound(const StateLayout& layout) {
  uint64_t end = 0, parameters = 0;
  std::set<std::string> names;
  for (const Unit& unit : layout.units) {
    EXPECT_EQ(unit.plane_offset % kUnitAlignment, 0u);
    EXPECT_GE(unit.plane_offset, end);
    EXPECT_LT(unit.plane_offset - end, kUnitAlignment) << "wasted space";
    EXPECT_EQ(unit.count % 128, 0u);
    uint64_t tensor_end = 0;
    for (const Tensor& tensor : unit.tensors) {
      EXPECT_TRUE(names.insert(tensor.name).second) << tensor.name;
      EXPECT_GE(tensor.offset, tensor_end) << tensor.name;
      EXPECT_LT(tensor.offset - tensor_end, 128u) << tensor.name;
      uint64_t count = 1;
      for (int64_t extent : tensor.shape) count *= extent;
      EXPECT_EQ(tensor.count, count) << tensor.name;
      tensor_end = tensor.offset + tensor.count;
    }
    EXPECT_GE(unit.count, tensor_end);
    EXPECT_LT(unit.count - tensor_end, 128u);
    end = unit.plane_offset + unit.count;
    parameters += Parameters(unit);
  }
  EXPECT_EQ(layout.plane_elements, AlignUp(end, kUnitAlignment));
  EXPECT_EQ(layout.parameters, parameters);
}

class PublishedModelTest : public ::testing::TestWithParam<Published> {};

TEST_P(PublishedModelTest, CountsEveryParameter) {
  const Published& published = GetParam();
  ASSERT_OK_AND_ASSIGN(ModelConfig config,
                       ParseModelConfig(published.ConfigJson(), "config.json"));
  EXPECT_EQ(config.head_dim, published.head_dim);
  StateLayout layout = MakeStateLayout(config);
  EXPECT_EQ(layout.parameters, published.parameters);
  EXPECT_EQ(Parameters(layout.units[1]), published.layer_parameters);
  EXPECT_EQ(layout.tied(), published.tied);
  EXPECT_EQ(layout.units.size(),
            static_cast<size_t>(published.layers + (published.tied ? 1 : 2)));
  ExpectSound(layout);
}

INSTANTIATE_TEST_SUITE_P(Dense, PublishedModelTest,
                         ::testing::ValuesIn(AllPublished()),
                         [](const ::testing::TestParamInfo<Published>& info) {
                           return info.param.name;
                         });

TEST(LayoutTest, Qwen3Of32BHasTheFilesShapes) {
  Published published;
  for (const Published& candidate : AllPublished()) {
    if (candidate.name == "Qwen3_32B") published = candidate;
  }
  ASSERT_OK_AND_ASSIGN(ModelConfig config,
                       ParseModelConfig(published.ConfigJson(), "config.json"));
  StateLayout layout = MakeStateLayout(config);
  std::map<std::string, std::vector<int64_t>> shapes;
  for (const Unit& unit : layout.units) {
    for (const Tensor& tensor : unit.tensors)
      shapes[tensor.name] = tensor.shape;
  }
  using Shape = std::vector<int64_t>;
  EXPECT_EQ(shapes.size(), 64u * 11 + 3);
  EXPECT_EQ(shapes["model.embed_tokens.weight"], (Shape{151936, 5120}));
  EXPECT_EQ(shapes["lm_head.weight"], (Shape{151936, 5120}));
  EXPECT_EQ(shapes["model.norm.weight"], Shape{5120});
  std::string last = "model.layers.63.";
  EXPECT_EQ(shapes[last + "self_attn.q_proj.weight"], (Shape{8192, 5120}));
  EXPECT_EQ(shapes[last + "self_attn.k_proj.weight"], (Shape{1024, 5120}));
  EXPECT_EQ(shapes[last + "self_attn.v_proj.weight"], (Shape{1024, 5120}));
  EXPECT_EQ(shapes[last + "self_attn.o_proj.weight"], (Shape{5120, 8192}));
  EXPECT_EQ(shapes[last + "self_attn.q_norm.weight"], Shape{128});
  EXPECT_EQ(shapes[last + "self_attn.k_norm.weight"], Shape{128});
  EXPECT_EQ(shapes[last + "mlp.gate_proj.weight"], (Shape{25600, 5120}));
  EXPECT_EQ(shapes[last + "mlp.up_proj.weight"], (Shape{25600, 5120}));
  EXPECT_EQ(shapes[last + "mlp.down_proj.weight"], (Shape{5120, 25600}));
  EXPECT_EQ(shapes[last + "input_layernorm.weight"], Shape{5120});
  EXPECT_EQ(shapes[last + "post_attention_layernorm.weight"], Shape{5120});
}

// Sizes that are multiples of nothing: groups must still start at 128 and
// members of a group must still touch.
TinyModelOptions OddSizes(Family family, bool tied) {
  TinyModelOptions options;
  options.family = family;
  options.tied = tied;
  options.hidden = 35;
  options.heads = 3;
  options.kv_heads = 1;
  options.head_dim = 6;
  options.intermediate = 53;
  options.vocab = 101;
  options.layers = 3;
  return options;
}

class OddLayoutTest
    : public ::testing::TestWithParam<std::tuple<Family, bool>> {};

TEST_P(OddLayoutTest, GroupsStartAlignedAndTheirMembersTouch) {
  auto [family, tied] = GetParam();
  StateLayout layout = MakeStateLayout(TinyConfig(OddSizes(family, tied)));
  ExpectSound(layout);
  auto end = [](const Tensor& tensor) { return tensor.offset + tensor.count; };
  std::set<Role> inside = {Role::kK, Role::kV, Role::kKBias, Role::kVBias,
                           Role::kUp};
  for (const Unit& unit : layout.units) {
    for (size_t i = 0; i < unit.tensors.size(); ++i) {
      const Tensor& tensor = unit.tensors[i];
      if (inside.count(tensor.role) != 0) {
        EXPECT_EQ(tensor.offset, end(unit.tensors[i - 1])) << tensor.name;
      } else {
        EXPECT_EQ(tensor.offset % 128, 0u) << tensor.name;
      }
      if (i > 0) {
        EXPECT_LT(unit.tensors[i - 1].role, tensor.role);
      }
    }
  }
  const Unit& decoder = layout.units[layout.decoder_unit(0)];
  EXPECT_EQ(decoder.has(Role::kQBias), family == Family::kQwen2);
  EXPECT_EQ(decoder.has(Role::kQNorm), family == Family::kQwen3);
}

TEST_P(OddLayoutTest, DecaysMatricesOnly) {
  auto [family, tied] = GetParam();
  StateLayout layout = MakeStateLayout(TinyConfig(OddSizes(family, tied)));
  for (const Unit& unit : layout.units) {
    for (const Tensor& tensor : unit.tensors) {
      EXPECT_EQ(tensor.decay, tensor.shape.size() == 2) << tensor.name;
    }
  }
}

TEST_P(OddLayoutTest, HeadIsWhereTheTieSays) {
  auto [family, tied] = GetParam();
  StateLayout layout = MakeStateLayout(TinyConfig(OddSizes(family, tied)));
  const Unit& head = layout.units[layout.head_unit()];
  EXPECT_EQ(layout.units[0].kind, UnitKind::kEmbedding);
  EXPECT_EQ(layout.units[0].layer, -1);
  for (int64_t layer = 0; layer < 3; ++layer) {
    EXPECT_EQ(layout.units[layout.decoder_unit(layer)].layer, layer);
  }
  EXPECT_TRUE(head.has(Role::kFinalNorm));
  EXPECT_EQ(head.has(Role::kHead), !tied);
  EXPECT_EQ(layout.head_unit(), tied ? 0 : 4);
  EXPECT_EQ(layout.units[0].has(Role::kFinalNorm), tied);
  if (tied) {
    EXPECT_GT(head.tensor(Role::kFinalNorm).offset,
              head.tensor(Role::kEmbedding).offset);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, OddLayoutTest,
    ::testing::Combine(::testing::Values(Family::kLlama, Family::kMistral,
                                         Family::kQwen2, Family::kQwen3),
                       ::testing::Bool()));

TEST(LayoutTest, HashIsStableAndTellsLayoutsApart) {
  // Checkpoints carry it: a change of this value makes them unreadable. The
  // value was computed by a separate program.
  StateLayout layout = MakeStateLayout(TinyConfig({}));
  EXPECT_EQ(layout.hash, 0x800f97a1fe8ae668u);
  EXPECT_EQ(MakeStateLayout(TinyConfig({})).hash, layout.hash);

  std::set<uint64_t> hashes = {layout.hash};
  TinyModelOptions changed;
  changed.vocab = 257;
  hashes.insert(MakeStateLayout(TinyConfig(changed)).hash);
  changed = {};
  changed.layers = 3;
  hashes.insert(MakeStateLayout(TinyConfig(changed)).hash);
  changed = {};
  changed.tied = true;
  hashes.insert(MakeStateLayout(TinyConfig(changed)).hash);
  changed = {};
  changed.family = Family::kQwen2;
  hashes.insert(MakeStateLayout(TinyConfig(changed)).hash);
  // Same counts, other shapes.
  changed = {};
  changed.heads = 8;
  changed.head_dim = 8;
  changed.kv_heads = 4;
  changed.family = Family::kLlama;
  uint64_t llama = MakeStateLayout(TinyConfig(changed)).hash;
  hashes.insert(llama);
  changed.heads = 4;
  changed.head_dim = 16;
  changed.kv_heads = 2;
  EXPECT_EQ(MakeStateLayout(TinyConfig(changed)).hash, llama)
      << "heads do not change tensors without q and k norms";
  EXPECT_EQ(hashes.size(), 6u);
}

TEST(LayoutDeathTest, AskingForAnAbsentTensorAborts) {
  StateLayout layout = MakeStateLayout(TinyConfig({}));
  EXPECT_DEATH(layout.units[0].tensor(Role::kGate), "no tensor of role");
}

}  // namespace
}  // namespace slidedp::model
