#include "common/model/config.h"

#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status.h"
#include "common/model/config_fields.h"
#include "common/model/rope.h"
#include "common/model/strict_json.h"

namespace slidedp::model {
namespace {

using nlohmann::json;

// Far above every published model and low enough that no size in elements or
// bytes, of one tensor or of the whole state, can overflow 63 bits.
constexpr int64_t kMaxHidden = int64_t{1} << 20;
constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxHeads = 65536;
constexpr int64_t kMaxHeadDim = 4096;
constexpr int64_t kMaxQueryDim = int64_t{1} << 22;
constexpr int64_t kMaxIntermediate = int64_t{1} << 22;
constexpr int64_t kMaxVocab = int64_t{1} << 24;
// Positions and windows fit 32-bit kernels' arithmetic.
constexpr int64_t kMaxPosition = int64_t{1} << 30;
constexpr int kMaxJsonDepth = 32;

struct FamilyRow {
  absl::string_view model_type;
  absl::string_view architecture;
  Family family;
};
constexpr FamilyRow kFamilies[] = {
    {"llama", "LlamaForCausalLM", Family::kLlama},
    {"mistral", "MistralForCausalLM", Family::kMistral},
    {"qwen2", "Qwen2ForCausalLM", Family::kQwen2},
    {"qwen3", "Qwen3ForCausalLM", Family::kQwen3},
};
constexpr absl::string_view kSupported =
    "supported: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, "
    "Qwen3ForCausalLM";

absl::StatusOr<Family> ParseFamily(const ConfigFields& fields) {
  SDP_ASSIGN_OR_RETURN(std::optional<std::string> model_type,
                       fields.OptionalString("model_type"));
  if (!model_type.has_value()) return fields.Missing("model_type");
  const FamilyRow* row = nullptr;
  for (const FamilyRow& candidate : kFamilies) {
    if (*model_type == candidate.model_type) row = &candidate;
  }
  if (row == nullptr) {
    return fields.Bad("model_type", "unsupported model", kSupported);
  }
  if (const json* names = fields.Find("architectures"); names != nullptr) {
    if (!names->is_array() || names->size() != 1 ||
        !names->front().is_string()) {
      return fields.Bad("architectures", "must be a list of one name", "");
    }
    if (names->front().get<std::string>() != row->architecture) {
      return InvalidInput(
          fields.file(), "architectures", Describe(names->front()),
          absl::StrCat("unsupported architecture for model_type ",
                       row->model_type),
          kSupported);
    }
  }
  return row->family;
}

// Settings that change what is computed, or stored, in a way we do not follow.
absl::Status RejectUnsupported(const ConfigFields& fields, Family family) {
  for (absl::string_view name : {"quantization_config", "compression_config"}) {
    if (fields.Find(name) != nullptr) {
      return fields.Bad(name, "quantised weights can not be fine-tuned",
                        "use the unquantised repository (BF16, F16 or F32)");
    }
  }
  for (absl::string_view name : {"text_config", "vision_config"}) {
    if (fields.Find(name) != nullptr) {
      return fields.Bad(name, "multimodal models are not supported",
                        kSupported);
    }
  }
  for (absl::string_view name :
       {"num_experts", "num_local_experts", "n_routed_experts"}) {
    SDP_ASSIGN_OR_RETURN(std::optional<int64_t> experts,
                         fields.OptionalInteger(name, INT64_MIN, INT64_MAX));
    if (experts.value_or(0) != 0) {
      return fields.Bad(name, "mixtures of experts are not supported",
                        kSupported);
    }
  }
  for (absl::string_view name : {"attention_bias", "mlp_bias", "use_mrope"}) {
    SDP_ASSIGN_OR_RETURN(bool on, fields.Boolean(name, false));
    // Qwen2 has its biases on q, k and v whatever this field says.
    if (on && !(family == Family::kQwen2 && name == "attention_bias")) {
      return fields.Bad(name, "not supported", "must be false");
    }
  }
  SDP_ASSIGN_OR_RETURN(std::optional<std::string> activation,
                       fields.OptionalString("hidden_act"));
  if (activation.value_or("silu") != "silu") {
    return fields.Bad("hidden_act", "unsupported activation",
                      "must be \"silu\"");
  }
  SDP_ASSIGN_OR_RETURN(std::optional<double> dropout,
                       fields.OptionalReal("attention_dropout", 0, 1));
  if (dropout.value_or(0) != 0) {
    return fields.Bad("attention_dropout", "dropout is not supported",
                      "set it to 0");
  }
  for (absl::string_view name : {"torch_dtype", "dtype"}) {
    SDP_ASSIGN_OR_RETURN(std::optional<std::string> dtype,
                         fields.OptionalString(name));
    if (dtype.has_value() && *dtype != "bfloat16" && *dtype != "float16" &&
        *dtype != "float32") {
      return fields.Bad(name, "unsupported weight type",
                        "must be bfloat16, float16 or float32");
    }
  }
  return absl::OkStatus();
}

absl::Status ParseDimensions(const ConfigFields& fields, ModelConfig& config) {
  SDP_ASSIGN_OR_RETURN(config.hidden,
                       fields.Integer("hidden_size", 1, kMaxHidden));
  SDP_ASSIGN_OR_RETURN(config.layers,
                       fields.Integer("num_hidden_layers", 1, kMaxLayers));
  SDP_ASSIGN_OR_RETURN(config.heads,
                       fields.Integer("num_attention_heads", 1, kMaxHeads));
  SDP_ASSIGN_OR_RETURN(
      std::optional<int64_t> kv_heads,
      fields.OptionalInteger("num_key_value_heads", 1, kMaxHeads));
  config.kv_heads = kv_heads.value_or(config.heads);
  if (config.heads % config.kv_heads != 0) {
    return fields.Bad(
        "num_key_value_heads",
        absl::StrCat("must divide num_attention_heads = ", config.heads), "");
  }
  SDP_ASSIGN_OR_RETURN(std::optional<int64_t> head_dim,
                       fields.OptionalInteger("head_dim", 1, kMaxHeadDim));
  if (!head_dim.has_value()) {
    if (config.hidden % config.heads != 0) {
      return fields.Bad("hidden_size",
                        absl::StrCat("not a multiple of num_attention_heads = ",
                                     config.heads),
                        "give head_dim");
    }
    head_dim = config.hidden / config.heads;
  }
  config.head_dim = *head_dim;
  if (config.head_dim % 2 != 0 || config.head_dim > kMaxHeadDim) {
    return InvalidInput(
        fields.file(), "head_dim", absl::StrCat(config.head_dim),
        absl::StrCat("must be even and at most ", kMaxHeadDim), "");
  }
  if (config.q_dim() > kMaxQueryDim) {
    return fields.Bad(
        "num_attention_heads",
        absl::StrCat("with head_dim ", config.head_dim, " makes more than ",
                     kMaxQueryDim, " query elements a token"),
        "");
  }
  SDP_ASSIGN_OR_RETURN(
      config.intermediate,
      fields.Integer("intermediate_size", 1, kMaxIntermediate));
  SDP_ASSIGN_OR_RETURN(config.vocab,
                       fields.Integer("vocab_size", 2, kMaxVocab));
  SDP_ASSIGN_OR_RETURN(
      config.max_position,
      fields.Integer("max_position_embeddings", 1, kMaxPosition));
  SDP_ASSIGN_OR_RETURN(config.rms_eps, fields.Real("rms_norm_eps", 1e-12, 0.1));
  SDP_ASSIGN_OR_RETURN(config.tied,
                       fields.Boolean("tie_word_embeddings", false));
  return absl::OkStatus();
}

// Which layers slide when layer_types does not say.
absl::StatusOr<int64_t> FirstSlidingLayer(const ConfigFields& fields,
                                          Family family) {
  if (family == Family::kMistral) return 0;
  SDP_ASSIGN_OR_RETURN(
      std::optional<int64_t> first,
      fields.OptionalInteger("max_window_layers", 0, INT64_MAX));
  // transformers' default for both Qwen families.
  return first.value_or(28);
}

absl::Status ParseWindows(const ConfigFields& fields, ModelConfig& config) {
  config.window.assign(static_cast<size_t>(config.layers), 0);
  SDP_ASSIGN_OR_RETURN(
      std::optional<int64_t> size,
      fields.OptionalInteger("sliding_window", INT64_MIN, INT64_MAX));
  bool slides = size.has_value();
  SDP_ASSIGN_OR_RETURN(bool used, fields.Boolean("use_sliding_window", false));
  switch (config.family) {
    case Family::kLlama:
      if (slides || used) {
        return fields.Bad(slides ? "sliding_window" : "use_sliding_window",
                          "llama models have no sliding window",
                          "remove it or set it to null");
      }
      break;
    case Family::kMistral:
      break;
    case Family::kQwen2:
    case Family::kQwen3:
      if (used && !slides) return fields.Missing("sliding_window");
      slides = used;
      break;
  }
  if (slides && (*size < 1 || *size > kMaxPosition)) {
    return fields.Bad("sliding_window",
                      absl::StrCat("must be from 1 to ", kMaxPosition),
                      "null means full attention");
  }
  const json* types = fields.Find("layer_types");
  if (types == nullptr) {
    if (!slides) return absl::OkStatus();
    SDP_ASSIGN_OR_RETURN(int64_t first,
                         FirstSlidingLayer(fields, config.family));
    for (int64_t i = first; i < config.layers; ++i) config.window[i] = *size;
    return absl::OkStatus();
  }
  if (!types->is_array() ||
      types->size() != static_cast<size_t>(config.layers)) {
    return fields.Bad("layer_types",
                      absl::StrCat("must be a list of num_hidden_layers = ",
                                   config.layers, " items"),
                      "");
  }
  for (size_t i = 0; i < types->size(); ++i) {
    const json& type = (*types)[i];
    bool sliding = type == "sliding_attention";
    if (!sliding && type != "full_attention") {
      return InvalidInput(
          fields.file(), absl::StrCat("layer_types[", i, "]"), Describe(type),
          "unsupported layer type",
          "must be \"full_attention\" or \"sliding_attention\"");
    }
    if (sliding && !slides) {
      return InvalidInput(
          fields.file(), absl::StrCat("layer_types[", i, "]"), Describe(type),
          "but the model has no sliding window",
          "give sliding_window (and use_sliding_window for Qwen models)");
    }
    if (sliding) config.window[i] = *size;
  }
  return absl::OkStatus();
}

}  // namespace

absl::string_view FamilyName(Family family) {
  for (const FamilyRow& row : kFamilies) {
    if (row.family == family) return row.model_type;
  }
  SDP_CHECK(false, "unknown family");
}

absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view text,
                                             absl::string_view file) {
  SDP_ASSIGN_OR_RETURN(json object, ParseStrictJson(text, file, kMaxJsonDepth));
  if (!object.is_object()) {
    return InvalidInput(
        file, "", "",
        absl::StrCat("must hold a JSON object, not ", JsonTypeName(object)),
        "");
  }
  ConfigFields fields(object, file, "");
  ModelConfig config;
  SDP_ASSIGN_OR_RETURN(config.family, ParseFamily(fields));
  SDP_RETURN_IF_ERROR(RejectUnsupported(fields, config.family));
  SDP_RETURN_IF_ERROR(ParseDimensions(fields, config));
  SDP_RETURN_IF_ERROR(ParseWindows(fields, config));
  SDP_ASSIGN_OR_RETURN(config.rope, ParseRope(fields, config.family));
  config.qkv_bias = config.family == Family::kQwen2;
  config.qk_norm = config.family == Family::kQwen3;
  return config;
}

}  // namespace slidedp::model
