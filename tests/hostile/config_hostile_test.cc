// Any bytes as config.json: a clear refusal, or a config whose layout is sound.
#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/model/config.h"
#include "common/model/layout.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/hostile/mutations.h"
#include "tests/testing/random.h"
#include "tests/testing/temp_folder.h"
#include "tests/testing/tiny_model.h"

namespace slidedp::model {
namespace {

using nlohmann::json;
using testing::IsClearRefusal;
using testing::Random;

constexpr char kConfigFile[] = "dir/config.json";

std::vector<std::string> Originals() {
  std::vector<std::string> texts;
  for (const char* name : {"llama_tied", "llama3_scaled_rope",
                           "mistral_sliding", "qwen2_tied", "qwen3_untied"}) {
    texts.push_back(testing::ReadWhole(
        absl::StrCat("tests/goldens/", name, "/model/config.json")));
  }
  testing::TinyModelOptions options;
  options.old_config = options.llama3_rope = true;
  options.family = Family::kLlama;
  texts.push_back(testing::TinyConfigJson(options));
  options.family = Family::kQwen2;
  options.window = 8;
  texts.push_back(testing::TinyConfigJson(options));
  return texts;
}

void ExpectSound(const ModelConfig& c) {
  ASSERT_GT(c.hidden, 0);
  ASSERT_GT(c.layers, 0);
  ASSERT_GT(c.kv_heads, 0);
  ASSERT_EQ(c.heads % c.kv_heads, 0);
  ASSERT_GT(c.head_dim, 0);
  ASSERT_EQ(c.head_dim % 2, 0);
  ASSERT_GT(c.intermediate, 0);
  ASSERT_GT(c.vocab, 0);
  ASSERT_GT(c.max_position, 0);
  ASSERT_GT(c.rms_eps, 0);
  ASSERT_EQ(c.window.size(), static_cast<size_t>(c.layers));
  for (int64_t window : c.window) ASSERT_GE(window, 0);
  for (float f : RopeInverseFrequencies(c)) {
    ASSERT_TRUE(std::isfinite(f) && f > 0 && f <= 1) << f;
  }
  StateLayout layout = MakeStateLayout(c);
  ASSERT_LT(layout.plane_elements, uint64_t{1} << 59);
  unsigned __int128 parameters = 0;
  uint64_t end = 0;
  for (const Unit& unit : layout.units) {
    ASSERT_GE(unit.plane_offset, end);
    end = unit.plane_offset + unit.count;
    for (const Tensor& tensor : unit.tensors) {
      unsigned __int128 count = 1;
      for (int64_t extent : tensor.shape) count *= extent;
      ASSERT_TRUE(count == tensor.count) << "overflow";
      ASSERT_LE(tensor.offset + tensor.count, unit.count);
      parameters += count;
    }
  }
  ASSERT_TRUE(parameters == layout.parameters);
  ASSERT_LE(end, layout.plane_elements);
}

void CheckConfig(const std::string& text, testing::Tally& tally) {
  auto config = ParseModelConfig(text, kConfigFile);
  if (config.ok()) {
    ++tally.accepted;
    ExpectSound(*config);
  } else {
    ++tally.refused;
    EXPECT_TRUE(IsClearRefusal(config.status(), kConfigFile));
  }
}

TEST(ConfigHostileTest, DamagedText) {
  Random random(1);
  testing::Tally tally;
  for (const std::string& text : Originals()) {
    for (int i = 0; i < 300; ++i) {
      SCOPED_TRACE(absl::StrCat("mutation ", i));
      CheckConfig(testing::MutateBytes(text, random), tally);
      if (HasFatalFailure()) return;
    }
  }
  EXPECT_GT(tally.refused, 1000);
  EXPECT_GT(tally.accepted, 20);
}

TEST(ConfigHostileTest, DamagedValues) {
  Random random(2);
  testing::Tally tally;
  for (const std::string& text : Originals()) {
    json config = json::parse(text);
    for (int i = 0; i < 600; ++i) {
      SCOPED_TRACE(absl::StrCat("mutation ", i));
      CheckConfig(testing::MutateJson(config, random), tally);
      if (HasFatalFailure()) return;
    }
  }
  EXPECT_GT(tally.refused, 1000);
  EXPECT_GT(tally.accepted, 100);
}

// The largest dimensions that are let through, all at once, do not overflow.
TEST(ConfigHostileTest, LargestDimensions) {
  json config = json::parse(testing::TinyConfigJson({}));
  config["tie_word_embeddings"] = false;
  config["hidden_size"] = 1 << 20;
  config["num_hidden_layers"] = 4096;
  config["num_attention_heads"] = config["num_key_value_heads"] = 1024;
  config["head_dim"] = 4096;
  config["intermediate_size"] = 1 << 22;
  config["vocab_size"] = 1 << 24;
  config["max_position_embeddings"] = int64_t{1} << 30;
  auto parsed = ParseModelConfig(config.dump(), kConfigFile);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  ExpectSound(*parsed);
  for (const char* name :
       {"hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim",
        "intermediate_size", "vocab_size", "max_position_embeddings"}) {
    json larger = config;
    larger[name] = larger[name].get<int64_t>() * 2;
    EXPECT_TRUE(IsClearRefusal(
        ParseModelConfig(larger.dump(), kConfigFile).status(), kConfigFile))
        << name;
  }
}

TEST(ConfigHostileTest, EveryTruncation) {
  for (const std::string& text : Originals()) {
    // The last byte is the newline after the object.
    for (size_t bytes = 0; bytes + 1 < text.size(); ++bytes) {
      auto config = ParseModelConfig(text.substr(0, bytes), kConfigFile);
      ASSERT_FALSE(config.ok() && text[bytes] != '\n') << bytes;
      if (!config.ok()) {
        ASSERT_TRUE(IsClearRefusal(config.status(), kConfigFile));
      }
    }
  }
}

}  // namespace
}  // namespace slidedp::model
