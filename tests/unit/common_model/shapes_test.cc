#include "common/model/shapes.h"

#include <map>

#include "common/model/layout.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/status_matchers.h"
#include "tests/unit/common_model/published.h"

namespace slidedp::model {
namespace {

using ::slidedp::testing::StatusIs;
using ::testing::HasSubstr;

ModelConfig ConfigOf(const Shape& shape) {
  absl::StatusOr<ModelConfig> config =
      ParseModelConfig(ConfigJson(shape), "config.json");
  EXPECT_OK(config.status()) << shape.name;
  return *std::move(config);
}

TEST(ShapesTest, ConfigFilesSayWhatTheShapesSay) {
  for (const Shape& shape : PublishedShapes()) {
    const ModelConfig config = ConfigOf(shape);
    EXPECT_EQ(config.family, shape.family) << shape.name;
    EXPECT_EQ(config.hidden, shape.hidden) << shape.name;
    EXPECT_EQ(config.layers, shape.layers) << shape.name;
    EXPECT_EQ(config.heads, shape.heads) << shape.name;
    EXPECT_EQ(config.kv_heads, shape.kv_heads) << shape.name;
    EXPECT_EQ(config.head_dim, shape.head_dim) << shape.name;
    EXPECT_EQ(config.intermediate, shape.intermediate) << shape.name;
    EXPECT_EQ(config.vocab, shape.vocab) << shape.name;
    EXPECT_EQ(config.max_position, shape.max_position) << shape.name;
    EXPECT_EQ(config.rms_eps, shape.rms_eps) << shape.name;
    EXPECT_EQ(config.rope.theta, shape.rope_theta) << shape.name;
    EXPECT_EQ(config.rope.llama3_factor, shape.llama3_factor) << shape.name;
    EXPECT_EQ(config.tied, shape.tied) << shape.name;
    for (int64_t window : config.window) EXPECT_EQ(window, 0) << shape.name;
  }
}

// The repositories' own counts.
TEST(ShapesTest, ParameterCountsAreThoseOfTheRepositories) {
  std::map<std::string, uint64_t> published;
  for (const Published& model : AllPublished()) {
    published[model.name] = model.parameters;
  }
  const std::map<std::string, std::string> names = {
      {"qwen3-0.6b", "Qwen3_0_6B"},
      {"qwen3-1.7b", "Qwen3_1_7B"},
      {"qwen3-4b", "Qwen3_4B"},
      {"qwen3-8b", "Qwen3_8B"},
      {"qwen3-14b", "Qwen3_14B"},
      {"qwen3-32b", "Qwen3_32B"},
      {"qwen2.5-0.5b", "Qwen2_5_0_5B"},
      {"qwen2.5-1.5b", "Qwen2_5_1_5B"},
      {"qwen2.5-3b", "Qwen2_5_3B"},
      {"qwen2.5-7b", "Qwen2_5_7B"},
      {"qwen2.5-14b", "Qwen2_5_14B"},
      {"qwen2.5-32b", "Qwen2_5_32B"},
      {"qwen2.5-72b", "Qwen2_5_72B"},
      {"llama3.2-1b", "Llama_3_2_1B"},
      {"llama3.2-3b", "Llama_3_2_3B"},
      {"llama3.1-8b", "Llama_3_8B"},
      {"llama3.1-70b", "Llama_3_70B"},
      {"mistral-small-24b", "Mistral_Small_24B"},
  };
  EXPECT_EQ(names.size(), PublishedShapes().size());
  for (const Shape& shape : PublishedShapes()) {
    ASSERT_TRUE(names.contains(shape.name)) << shape.name;
    EXPECT_EQ(MakeStateLayout(ConfigOf(shape)).parameters,
              published.at(names.at(shape.name)))
        << shape.name;
  }
}

// One step of 65,536 tokens in sequences of 4096, as the script that measures
// the peers counts it. It gives every model a vocabulary of 151,936.
TEST(ShapesTest, FlopsAreThoseOfThePeersScript) {
  const struct {
    const char* name;
    uint64_t parameters;
    double dense, head, attention;
  } kPeers[] = {
      {"qwen3-0.6b", 596049920, 173173081374720, 61177514164224,
       92358976733184},
      {"qwen3-1.7b", 1720574976, 554153860399104, 122355028328448,
       92358976733184},
      {"qwen3-4b", 4022468096, 1428677921341440, 152943785410560,
       237494511599616},
      {"qwen3-8b", 8190735360, 2731186883395584, 244710056656896,
       237494511599616},
      {"qwen3-14b", 14768307200, 5195192441241600, 305887570821120,
       329853488332800},
      {"qwen3-32b", 32762123264, 12270549765980160, 305887570821120,
       844424930131968},
      {"qwen2.5-0.5b", 494032768, 140703128616960, 53530324893696,
       34634616274944},
      {"qwen2.5-1.5b", 1543714304, 515189917089792, 91766271246336,
       69269232549888},
      {"qwen2.5-3b", 3085938688, 1090990412660736, 122355028328448,
       118747255799808},
      {"qwen2.5-7b", 7614699008, 2565847822368768, 214121299574784,
       161628209283072},
      {"qwen2.5-14b", 14768722944, 5195192441241600, 305887570821120,
       395824185999360},
      {"qwen2.5-32b", 32762565632, 12270549765980160, 305887570821120,
       527765581332480},
  };
  for (const auto& peer : kPeers) {
    ASSERT_OK_AND_ASSIGN(Shape shape, FindShape(peer.name));
    shape.vocab = 151936;
    const ModelConfig config = ConfigOf(shape);
    EXPECT_EQ(MakeStateLayout(config).parameters, peer.parameters) << peer.name;
    const StepFlops flops = ModelFlops(config, 65536, 4096);
    EXPECT_DOUBLE_EQ(flops.dense, peer.dense) << peer.name;
    EXPECT_DOUBLE_EQ(flops.head, peer.head) << peer.name;
    EXPECT_DOUBLE_EQ(flops.attention, peer.attention) << peer.name;
    EXPECT_DOUBLE_EQ(flops.total(), peer.dense + peer.head + peer.attention);
  }
}

TEST(ShapesTest, UnknownNameListsTheKnownOnes) {
  EXPECT_THAT(FindShape("qwen4-1b"),
              StatusIs(absl::StatusCode::kNotFound,
                       ::testing::AllOf(HasSubstr("qwen4-1b"),
                                        HasSubstr("mistral-small-24b"))));
}

}  // namespace
}  // namespace slidedp::model
