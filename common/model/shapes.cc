#include "common/model/shapes.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace slidedp::model {
namespace {

const char* Architecture(Family family) {
  switch (family) {
    case Family::kLlama:
      return "LlamaForCausalLM";
    case Family::kMistral:
      return "MistralForCausalLM";
    case Family::kQwen2:
      return "Qwen2ForCausalLM";
    case Family::kQwen3:
      return "Qwen3ForCausalLM";
  }
  return "";
}

std::vector<Shape> MakeShapes() {
  constexpr Family q3 = Family::kQwen3, q2 = Family::kQwen2,
                   ll = Family::kLlama, mi = Family::kMistral;
  // name, family, hidden, layers, heads, kv heads, head dim, intermediate,
  // vocab, positions, eps, theta, llama3 factor, tied
  return {
      {"qwen3-0.6b", q3, 1024, 28, 16, 8, 128, 3072, 151936, 40960, 1e-6, 1e6,
       0, true},
      {"qwen3-1.7b", q3, 2048, 28, 16, 8, 128, 6144, 151936, 40960, 1e-6, 1e6,
       0, true},
      {"qwen3-4b", q3, 2560, 36, 32, 8, 128, 9728, 151936, 40960, 1e-6, 1e6, 0,
       true},
      {"qwen3-8b", q3, 4096, 36, 32, 8, 128, 12288, 151936, 40960, 1e-6, 1e6, 0,
       false},
      {"qwen3-14b", q3, 5120, 40, 40, 8, 128, 17408, 151936, 40960, 1e-6, 1e6,
       0, false},
      {"qwen3-32b", q3, 5120, 64, 64, 8, 128, 25600, 151936, 40960, 1e-6, 1e6,
       0, false},
      {"qwen2.5-0.5b", q2, 896, 24, 14, 2, 64, 4864, 151936, 32768, 1e-6, 1e6,
       0, true},
      {"qwen2.5-1.5b", q2, 1536, 28, 12, 2, 128, 8960, 151936, 131072, 1e-6,
       1e6, 0, true},
      {"qwen2.5-3b", q2, 2048, 36, 16, 2, 128, 11008, 151936, 32768, 1e-6, 1e6,
       0, true},
      {"qwen2.5-7b", q2, 3584, 28, 28, 4, 128, 18944, 152064, 131072, 1e-6, 1e6,
       0, false},
      {"qwen2.5-14b", q2, 5120, 48, 40, 8, 128, 13824, 152064, 131072, 1e-5,
       1e6, 0, false},
      {"qwen2.5-32b", q2, 5120, 64, 40, 8, 128, 27648, 152064, 131072, 1e-5,
       1e6, 0, false},
      {"qwen2.5-72b", q2, 8192, 80, 64, 8, 128, 29568, 152064, 131072, 1e-5,
       1e6, 0, false},
      {"llama3.2-1b", ll, 2048, 16, 32, 8, 64, 8192, 128256, 131072, 1e-5, 5e5,
       32, true},
      {"llama3.2-3b", ll, 3072, 28, 24, 8, 128, 8192, 128256, 131072, 1e-5, 5e5,
       32, true},
      {"llama3.1-8b", ll, 4096, 32, 32, 8, 128, 14336, 128256, 131072, 1e-5,
       5e5, 8, false},
      {"llama3.1-70b", ll, 8192, 80, 64, 8, 128, 28672, 128256, 131072, 1e-5,
       5e5, 8, false},
      {"mistral-small-24b", mi, 5120, 40, 32, 8, 128, 32768, 131072, 32768,
       1e-5, 1e8, 0, false},
  };
}

}  // namespace

const std::vector<Shape>& PublishedShapes() {
  static const std::vector<Shape> shapes = MakeShapes();
  return shapes;
}

absl::StatusOr<Shape> FindShape(absl::string_view name) {
  std::vector<std::string> names;
  for (const Shape& shape : PublishedShapes()) {
    if (shape.name == name) return shape;
    names.push_back(shape.name);
  }
  return absl::NotFoundError(absl::StrCat("there is no published shape ", name,
                                          "; there are ",
                                          absl::StrJoin(names, ", ")));
}

std::string ConfigJson(const Shape& shape) {
  const std::string rope =
      shape.llama3_factor == 0
          ? ""
          : absl::StrCat(
                R"("rope_scaling": {"rope_type": "llama3", "factor": )",
                shape.llama3_factor,
                R"(, "low_freq_factor": 1.0, "high_freq_factor": 4.0,)",
                R"( "original_max_position_embeddings": 8192}, )");
  return absl::StrCat(
      R"({"architectures": [")", Architecture(shape.family),
      R"("], "model_type": ")", FamilyName(shape.family),
      R"(", "hidden_act": "silu", "hidden_size": )", shape.hidden,
      R"(, "num_hidden_layers": )", shape.layers,
      R"(, "num_attention_heads": )", shape.heads,
      R"(, "num_key_value_heads": )", shape.kv_heads, R"(, "head_dim": )",
      shape.head_dim, R"(, "intermediate_size": )", shape.intermediate,
      R"(, "vocab_size": )", shape.vocab, R"(, "max_position_embeddings": )",
      shape.max_position, R"(, "rms_norm_eps": )", shape.rms_eps,
      R"(, "rope_theta": )", shape.rope_theta, ", ", rope,
      R"("sliding_window": null, "tie_word_embeddings": )",
      shape.tied ? "true" : "false", R"(, "torch_dtype": "bfloat16"})");
}

StepFlops ModelFlops(const ModelConfig& config, double tokens,
                     double sequence_length) {
  const auto h = static_cast<double>(config.hidden);
  const auto q = static_cast<double>(config.q_dim());
  const auto layers = static_cast<double>(config.layers);
  const double weights = h * static_cast<double>(config.qkv_dim()) + q * h +
                         3 * h * static_cast<double>(config.intermediate);
  return {6 * tokens * layers * weights,
          6 * tokens * h * static_cast<double>(config.vocab),
          6 * tokens * layers * sequence_length * q};
}

}  // namespace slidedp::model
