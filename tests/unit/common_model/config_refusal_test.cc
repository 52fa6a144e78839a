// What a config.json must not say, and what is told about it.
#include <functional>
#include <string>
#include <vector>

#include "common/model/config.h"
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
using ::testing::HasSubstr;
using ::testing::StartsWith;
using testing::TinyConfigJson;
using testing::TinyModelOptions;

struct Refusal {
  const char* what;
  Family family;
  std::function<void(json&)> change;
  // Must all be in the message: field, value, expectation.
  std::vector<const char*> told;
};

std::vector<Refusal> Refusals() {
  const Family q3 = Family::kQwen3, q2 = Family::kQwen2, ll = Family::kLlama,
               mi = Family::kMistral;
  auto set = [](const char* name, json value) {
    return [=](json& config) { config[name] = value; };
  };
  auto erase = [](const char* name) {
    return [=](json& config) { config.erase(name); };
  };
  auto rope = [](const char* name, json value) {
    return [=](json& config) { config["rope_parameters"][name] = value; };
  };
  auto llama3 = [](const char* name, json value) {
    return [=](json& config) {
      config["rope_parameters"] = {
          {"rope_type", "llama3"},   {"rope_theta", 5e5},
          {"factor", 8.0},           {"low_freq_factor", 1.0},
          {"high_freq_factor", 4.0}, {"original_max_position_embeddings", 64}};
      config["rope_parameters"][name] = value;
    };
  };
  json sliding2 = {"sliding_attention", "sliding_attention"};
  return {
      {"MoeType",
       q3,
       set("model_type", "qwen3_moe"),
       {"model_type", "qwen3_moe", "supported: ", "Qwen3ForCausalLM"}},
      {"NoType", q3, erase("model_type"), {"model_type", "missing"}},
      {"TypeNumber",
       q3,
       set("model_type", 3),
       {"model_type = 3", "must be a string", "an integer"}},
      {"OtherArchitecture",
       ll,
       set("architectures", {"LlamaForSequenceClassification"}),
       {"architectures", "LlamaForSequenceClassification", "supported"}},
      {"TwoArchitectures",
       ll,
       set("architectures", {"LlamaForCausalLM", "X"}),
       {"architectures", "list of one"}},
      {"ArchitectureNumber", ll, set("architectures", {5}), {"architectures"}},
      {"ArchitectureOfOtherFamily",
       q2,
       set("architectures", {"LlamaForCausalLM"}),
       {"architectures", "qwen2"}},
      {"Quantised",
       q3,
       set("quantization_config", {{"quant_method", "fp8"}}),
       {"quantization_config", "unquantised"}},
      {"Experts",
       q3,
       set("num_local_experts", 8),
       {"num_local_experts = 8", "experts"}},
      {"Multimodal",
       mi,
       set("text_config", json::object()),
       {"text_config", "supported"}},
      {"AttentionBias",
       ll,
       set("attention_bias", true),
       {"attention_bias = true", "must be false"}},
      {"AttentionBiasQwen3",
       q3,
       set("attention_bias", true),
       {"attention_bias = true"}},
      {"MlpBias", ll, set("mlp_bias", true), {"mlp_bias = true"}},
      {"MlpBiasString",
       ll,
       set("mlp_bias", "false"),
       {"mlp_bias = \"false\"", "true or false", "a string"}},
      {"Gelu", q3, set("hidden_act", "gelu"), {"hidden_act", "gelu", "silu"}},
      {"Dropout",
       q3,
       set("attention_dropout", 0.1),
       {"attention_dropout = 0.1", "set it to 0"}},
      {"Float8", q3, set("dtype", "float8_e4m3fn"), {"dtype", "bfloat16"}},
      {"Float64", q3, set("torch_dtype", "float64"), {"torch_dtype"}},
      {"NoHidden", q3, erase("hidden_size"), {"hidden_size", "missing"}},
      {"HiddenZero",
       q3,
       set("hidden_size", 0),
       {"hidden_size = 0", "from 1 to"}},
      {"HiddenNegative", q3, set("hidden_size", -64), {"hidden_size = -64"}},
      {"HiddenReal",
       q3,
       set("hidden_size", 64.5),
       {"hidden_size = 64.5", "an integer"}},
      {"HiddenString",
       q3,
       set("hidden_size", "64"),
       {"hidden_size = \"64\"", "an integer"}},
      {"HiddenHuge", q3, set("hidden_size", UINT64_MAX), {"hidden_size"}},
      {"HiddenInt64", q3, set("hidden_size", INT64_MAX), {"hidden_size"}},
      {"LayersHuge",
       q3,
       set("num_hidden_layers", 1000000000),
       {"num_hidden_layers = 1000000000"}},
      {"LayersZero", q3, set("num_hidden_layers", 0), {"num_hidden_layers"}},
      {"HeadsZero", q3, set("num_attention_heads", 0), {"num_attention_heads"}},
      {"HeadsTimesHeadDim",
       q3,
       [](json& c) {
         c["num_attention_heads"] = 65536;
         c["num_key_value_heads"] = 65536;
         c["head_dim"] = 4096;
       },
       {"num_attention_heads", "4096"}},
      {"KvHeads",
       q3,
       set("num_key_value_heads", 3),
       {"num_key_value_heads = 3", "must divide num_attention_heads = 4"}},
      {"MoreKvHeads",
       q3,
       set("num_key_value_heads", 8),
       {"num_key_value_heads = 8"}},
      {"HeadDimOdd", q3, set("head_dim", 15), {"head_dim = 15", "even"}},
      {"HeadDimOddDerived",
       q3,
       [](json& c) {
         c.erase("head_dim");
         c["hidden_size"] = 60;
       },
       {"head_dim = 15", "even"}},
      {"HeadDimNotDerivable",
       q3,
       [](json& c) {
         c.erase("head_dim");
         c["hidden_size"] = 66;
       },
       {"hidden_size = 66", "num_attention_heads = 4", "head_dim"}},
      {"VocabHuge", q3, set("vocab_size", int64_t{1} << 40), {"vocab_size"}},
      {"VocabList",
       q3,
       set("vocab_size", json::array({1})),
       {"vocab_size = [1 items]", "an array"}},
      {"NoEps", q3, erase("rms_norm_eps"), {"rms_norm_eps"}},
      {"EpsZero", q3, set("rms_norm_eps", 0), {"rms_norm_eps = 0"}},
      {"EpsNegative", q3, set("rms_norm_eps", -1e-6), {"rms_norm_eps"}},
      {"EpsString",
       q3,
       set("rms_norm_eps", "1e-6"),
       {"rms_norm_eps", "a number"}},
      {"TieString",
       q3,
       set("tie_word_embeddings", "yes"),
       {"tie_word_embeddings"}},
      {"NoMaxPosition",
       q3,
       erase("max_position_embeddings"),
       {"max_position_embeddings"}},
      {"RopeYarn",
       q3,
       rope("rope_type", "yarn"),
       {"rope_parameters.rope_type", "yarn", "llama3"}},
      {"RopeLinearOld",
       ll,
       set("rope_scaling", {{"type", "linear"}, {"factor", 2.0}}),
       {"rope_scaling.type", "linear"}},
      {"RopeTypesDisagree",
       ll,
       set("rope_scaling", {{"type", "llama3"}, {"rope_type", "default"}}),
       {"rope_scaling.rope_type", "contradicts"}},
      {"RopeMrope", q2, set("rope_scaling", {{"type", "mrope"}}), {"mrope"}},
      {"RopeScalingList",
       q3,
       set("rope_scaling", json::array()),
       {"rope_scaling", "an object"}},
      {"RopeTheta", q3, rope("rope_theta", 0), {"rope_theta = 0"}},
      {"RopeThetaHuge", q3, rope("rope_theta", 1e300), {"rope_theta"}},
      {"RopeThetaTwice",
       q3,
       set("rope_theta", 77.0),
       {"rope_theta = 77", "contradicts"}},
      {"RopeByLayerType",
       q3,
       rope("full_attention", json::object()),
       {"rope_parameters.full_attention"}},
      {"RopeFrequencyType",
       q3,
       rope("inverse_frequency_dtype", "float16"),
       {"rope_parameters.inverse_frequency_dtype", "float16", "bfloat16"}},
      {"RopePartial",
       q3,
       rope("partial_rotary_factor", 0.5),
       {"partial_rotary_factor = 0.5"}},
      {"Llama3NoFactor",
       ll,
       llama3("factor", nullptr),
       {"rope_parameters.factor", "missing"}},
      {"Llama3FactorSmall",
       ll,
       llama3("factor", 0.5),
       {"rope_parameters.factor = 0.5"}},
      {"Llama3BandsCross",
       ll,
       llama3("high_freq_factor", 1.0),
       {"high_freq_factor", "low_freq_factor = 1"}},
      {"Llama3Original",
       ll,
       llama3("original_max_position_embeddings", 0),
       {"original_max_position_embeddings = 0"}},
      {"LlamaWindow", ll, set("sliding_window", 8), {"sliding_window = 8"}},
      {"WindowZero", mi, set("sliding_window", 0), {"sliding_window = 0"}},
      {"WindowNegative", mi, set("sliding_window", -4), {"sliding_window"}},
      {"WindowHuge",
       mi,
       set("sliding_window", int64_t{1} << 40),
       {"sliding_window", "from 1 to"}},
      {"WindowUsedButNull",
       q2,
       set("use_sliding_window", true),
       {"sliding_window", "missing"}},
      {"LayerTypesLength",
       q2,
       set("layer_types", {"full_attention"}),
       {"layer_types", "num_hidden_layers = 2"}},
      {"LayerTypesUnknown",
       q2,
       set("layer_types", {"full_attention", "linear_attention"}),
       {"layer_types[1]", "linear_attention"}},
      {"LayerTypesNoWindow",
       q2,
       set("layer_types", sliding2),
       {"layer_types[0]", "use_sliding_window"}},
      {"LlamaLayerTypes", ll, set("layer_types", sliding2), {"layer_types[0]"}},
      {"MaxWindowLayers",
       q2,
       [](json& c) {
         c["use_sliding_window"] = true;
         c["sliding_window"] = 8;
         c["max_window_layers"] = -1;
       },
       {"max_window_layers = -1"}},
      {"Mrope", q2, set("use_mrope", true), {"use_mrope"}},
  };
}

class RefusalTest : public ::testing::TestWithParam<Refusal> {};

TEST_P(RefusalTest, NamesFileFieldAndExpectation) {
  json config = TinyConfigOf(GetParam().family);
  ASSERT_OK(Parse(config)) << "the unchanged config must be fine";
  GetParam().change(config);
  auto parsed = Parse(config);
  ASSERT_THAT(parsed, StatusIs(kInvalid, StartsWith("dir/config.json: ")));
  for (const char* told : GetParam().told) {
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr(told));
  }
}

INSTANTIATE_TEST_SUITE_P(All, RefusalTest, ::testing::ValuesIn(Refusals()),
                         [](const ::testing::TestParamInfo<Refusal>& info) {
                           return info.param.what;
                         });

}  // namespace
}  // namespace slidedp::model
