#include "common/model/config.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/testing/status_matchers.h"
#include "tests/testing/tiny_model.h"
#include "tests/unit/common_model/tiny_config.h"

namespace slidedp::model {
namespace {

using nlohmann::json;
using ::slidedp::testing::kInvalid;
using slidedp::testing::StatusIs;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::TinyConfigJson;
using testing::TinyModelOptions;

TEST(ConfigTest, ReadsEveryField) {
  TinyModelOptions options;
  options.kv_heads = 1;
  options.head_dim = 10;
  options.max_position = 777;
  options.tied = true;
  ASSERT_OK_AND_ASSIGN(ModelConfig c,
                       Parse(json::parse(TinyConfigJson(options))));
  EXPECT_EQ(c.family, Family::kQwen3);
  EXPECT_EQ(c.hidden, 64);
  EXPECT_EQ(c.layers, 2);
  EXPECT_EQ(c.heads, 4);
  EXPECT_EQ(c.kv_heads, 1);
  EXPECT_EQ(c.head_dim, 10);
  EXPECT_EQ(c.intermediate, 128);
  EXPECT_EQ(c.vocab, 256);
  EXPECT_EQ(c.max_position, 777);
  EXPECT_EQ(c.rms_eps, 1e-6);
  EXPECT_EQ(c.rope.theta, 10000);
  EXPECT_EQ(c.rope.llama3_factor, 0);
  EXPECT_TRUE(c.tied);
  EXPECT_FALSE(c.qkv_bias);
  EXPECT_TRUE(c.qk_norm);
  EXPECT_THAT(c.window, ElementsAre(0, 0));
  EXPECT_EQ(c.q_dim(), 40);
  EXPECT_EQ(c.kv_dim(), 10);
  EXPECT_EQ(c.qkv_dim(), 60);
}

TEST(ConfigTest, BothGenerationsSayTheSame) {
  for (bool llama3 : {false, true}) {
    TinyModelOptions options;
    options.family = Family::kLlama;
    options.llama3_rope = llama3;
    options.old_config = false;
    ASSERT_OK_AND_ASSIGN(ModelConfig now,
                         Parse(json::parse(TinyConfigJson(options))));
    options.old_config = true;
    json older = json::parse(TinyConfigJson(options));
    ASSERT_TRUE(older.contains("rope_scaling"));
    ASSERT_OK_AND_ASSIGN(ModelConfig before, Parse(older));
    EXPECT_EQ(before.rope.theta, now.rope.theta);
    EXPECT_EQ(before.rope.llama3_factor, llama3 ? 8 : 0);
    EXPECT_EQ(now.rope.llama3_factor, llama3 ? 8 : 0);
    EXPECT_EQ(before.rope.low_freq_factor, now.rope.low_freq_factor);
    EXPECT_EQ(before.rope.high_freq_factor, now.rope.high_freq_factor);
    EXPECT_EQ(before.rope.original_max_position,
              now.rope.original_max_position);
  }
}

TEST(ConfigTest, AbsentFieldsTakeTransformersDefaults) {
  json config = TinyConfigOf();
  for (const char* name :
       {"head_dim", "num_key_value_heads", "tie_word_embeddings", "hidden_act",
        "dtype", "attention_dropout", "architectures"}) {
    config.erase(name);
  }
  ASSERT_OK_AND_ASSIGN(ModelConfig c, Parse(config));
  EXPECT_EQ(c.head_dim, 16);
  EXPECT_EQ(c.kv_heads, 4);
  EXPECT_FALSE(c.tied);
  // null is absent.
  config["head_dim"] = config["num_key_value_heads"] = nullptr;
  config["rope_scaling"] = config["quantization_config"] = nullptr;
  EXPECT_OK(Parse(config));
}

TEST(ConfigTest, OnlyLlamaMayLackRopeTheta) {
  for (Family family :
       {Family::kLlama, Family::kMistral, Family::kQwen2, Family::kQwen3}) {
    json config = TinyConfigOf(family);
    config.erase("rope_parameters");
    auto parsed = Parse(config);
    if (family == Family::kLlama) {
      ASSERT_OK(parsed);
      EXPECT_EQ(parsed->rope.theta, 10000);
    } else {
      EXPECT_THAT(parsed, StatusIs(kInvalid, HasSubstr("rope_theta")));
    }
  }
}

TEST(ConfigTest, FamiliesDifferInBiasAndNorm) {
  for (Family family :
       {Family::kLlama, Family::kMistral, Family::kQwen2, Family::kQwen3}) {
    ASSERT_OK_AND_ASSIGN(ModelConfig c, Parse(TinyConfigOf(family)));
    EXPECT_EQ(c.family, family);
    EXPECT_EQ(c.qkv_bias, family == Family::kQwen2);
    EXPECT_EQ(c.qk_norm, family == Family::kQwen3);
  }
}

TEST(SlidingWindowTest, EveryMistralLayerSlides) {
  json config = TinyConfigOf(Family::kMistral);
  ASSERT_OK_AND_ASSIGN(ModelConfig full, Parse(config));
  EXPECT_THAT(full.window, Each(0));
  config.erase("sliding_window");
  ASSERT_OK_AND_ASSIGN(full, Parse(config));
  EXPECT_THAT(full.window, Each(0));
  config["sliding_window"] = 8;
  ASSERT_OK_AND_ASSIGN(ModelConfig sliding, Parse(config));
  EXPECT_THAT(sliding.window, ElementsAre(8, 8));
  // At or beyond max_position it hides nothing, but stays what it is.
  config["sliding_window"] = 4096;
  ASSERT_OK_AND_ASSIGN(sliding, Parse(config));
  EXPECT_THAT(sliding.window, ElementsAre(4096, 4096));
}

TEST(SlidingWindowTest, QwenSlidesFromMaxWindowLayersIfUsed) {
  for (Family family : {Family::kQwen2, Family::kQwen3}) {
    json config = TinyConfigOf(family);
    config["num_hidden_layers"] = 4;
    config["sliding_window"] = 16;
    config["max_window_layers"] = 3;
    ASSERT_OK_AND_ASSIGN(ModelConfig c, Parse(config));
    EXPECT_THAT(c.window, ElementsAre(0, 0, 0, 0)) << "inert unless used";
    config["use_sliding_window"] = true;
    ASSERT_OK_AND_ASSIGN(c, Parse(config));
    EXPECT_THAT(c.window, ElementsAre(0, 0, 0, 16));
    config["max_window_layers"] = 9;
    ASSERT_OK_AND_ASSIGN(c, Parse(config));
    EXPECT_THAT(c.window, Each(0));
    config.erase("max_window_layers");  // 28
    ASSERT_OK_AND_ASSIGN(c, Parse(config));
    EXPECT_THAT(c.window, Each(0));
    config["layer_types"] = {"sliding_attention", "full_attention",
                             "sliding_attention", "full_attention"};
    ASSERT_OK_AND_ASSIGN(c, Parse(config));
    EXPECT_THAT(c.window, ElementsAre(16, 0, 16, 0));
  }
}

TEST(SlidingWindowTest, MistralLayerTypesAreFollowed) {
  json config = TinyConfigOf(Family::kMistral);
  config["sliding_window"] = 8;
  config["layer_types"] = {"full_attention", "sliding_attention"};
  ASSERT_OK_AND_ASSIGN(ModelConfig c, Parse(config));
  EXPECT_THAT(c.window, ElementsAre(0, 8));
}

TEST(ConfigTest, RopeFrequenciesAreFloat32UnlessTheFileSaysOtherwise) {
  json config = TinyConfigOf();
  ASSERT_OK_AND_ASSIGN(ModelConfig c, Parse(config));
  EXPECT_FALSE(c.rope.bf16_inverse_frequencies);
  config["rope_parameters"]["inverse_frequency_dtype"] = "float32";
  ASSERT_OK_AND_ASSIGN(c, Parse(config));
  EXPECT_FALSE(c.rope.bf16_inverse_frequencies);
  config["rope_parameters"]["inverse_frequency_dtype"] = "bfloat16";
  ASSERT_OK_AND_ASSIGN(c, Parse(config));
  EXPECT_TRUE(c.rope.bf16_inverse_frequencies);
}

TEST(ConfigTest, Qwen2IgnoresAttentionBias) {
  // Its biases are always there, whatever the field says.
  json config = TinyConfigOf(Family::kQwen2);
  for (bool value : {false, true}) {
    config["attention_bias"] = value;
    ASSERT_OK_AND_ASSIGN(ModelConfig c, Parse(config));
    EXPECT_TRUE(c.qkv_bias);
  }
}

TEST(ConfigTest, RefusesWhatIsNotJson) {
  auto parse = [](absl::string_view text) {
    return ParseModelConfig(text, "f");
  };
  std::string good = TinyConfigOf().dump();
  EXPECT_OK(parse(good));
  EXPECT_THAT(parse(""), StatusIs(kInvalid, HasSubstr("not valid JSON")));
  EXPECT_THAT(parse("[]"), StatusIs(kInvalid, HasSubstr("JSON object")));
  EXPECT_THAT(parse("3"), StatusIs(kInvalid, HasSubstr("JSON object")));
  EXPECT_THAT(parse(good + "x"), StatusIs(kInvalid, HasSubstr("at byte")));
  EXPECT_THAT(parse(good.substr(0, good.size() - 1)), StatusIs(kInvalid));
  EXPECT_THAT(parse("{\"a\": 1e999}"), StatusIs(kInvalid));
  EXPECT_THAT(parse("{\"a\": NaN}"), StatusIs(kInvalid));
  EXPECT_THAT(parse("{\"a\": \"\xff\xfe\"}"), StatusIs(kInvalid));
  std::string twice = good;
  twice.insert(1, "\"hidden_size\": 64, ");
  EXPECT_THAT(parse(twice),
              StatusIs(kInvalid, AllOf(HasSubstr("duplicate"),
                                       HasSubstr("hidden_size"))));
}

TEST(ConfigTest, DepthBombsEndEarly) {
  for (const char* open : {"[", "{\"a\":"}) {
    std::string bomb = "{\"x\": ";
    for (int i = 0; i < 1000000; ++i) bomb += open;
    EXPECT_THAT(ParseModelConfig(bomb, "f"),
                StatusIs(kInvalid, HasSubstr("nested deeper")));
  }
}

TEST(ConfigTest, MessagesAreOneShortLine) {
  json config = TinyConfigOf();
  config["model_type"] = std::string(100000, '\n') + "\x1b[2J";
  auto parsed = Parse(config);
  ASSERT_THAT(parsed, StatusIs(kInvalid));
  std::string message(parsed.status().message());
  EXPECT_LT(message.size(), 1000u);
  EXPECT_EQ(message.find('\n'), std::string::npos);
  EXPECT_EQ(message.find('\x1b'), std::string::npos);
}

}  // namespace
}  // namespace slidedp::model
