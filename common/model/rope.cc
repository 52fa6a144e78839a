#include "common/model/rope.h"

#include <cmath>
#include <numbers>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/bf16.h"
#include "common/base/status.h"
#include "common/model/strict_json.h"

namespace slidedp::model {
namespace {

using nlohmann::json;

constexpr double kMaxTheta = 1e12;

absl::Status RejectPartial(const ConfigFields& fields) {
  SDP_ASSIGN_OR_RETURN(std::optional<double> part,
                       fields.OptionalReal("partial_rotary_factor", 0, 1));
  if (part.value_or(1) != 1) {
    return fields.Bad("partial_rotary_factor",
                      "partial rotary embeddings are not supported",
                      "must be 1");
  }
  return absl::OkStatus();
}

// The scaling part of rope_scaling or rope_parameters.
absl::Status ParseScaling(const ConfigFields& fields, RopeConfig& rope) {
  SDP_RETURN_IF_ERROR(RejectPartial(fields));
  std::string type = "default";
  // Older files say "type"; some say both, and must then agree.
  std::optional<std::string> before;
  for (absl::string_view name : {"type", "rope_type"}) {
    SDP_ASSIGN_OR_RETURN(std::optional<std::string> value,
                         fields.OptionalString(name));
    if (!value.has_value()) continue;
    if (*value != "default" && *value != "llama3") {
      return fields.Bad(name, "unsupported rope type",
                        "supported: \"default\", \"llama3\"");
    }
    if (before.has_value() && *before != *value) {
      return fields.Bad(
          name, absl::StrCat("contradicts type = \"", *before, "\""), "");
    }
    before = type = *value;
  }
  if (type == "default") return absl::OkStatus();

  SDP_ASSIGN_OR_RETURN(rope.llama3_factor, fields.Real("factor", 1, 1e6));
  SDP_ASSIGN_OR_RETURN(rope.low_freq_factor,
                       fields.Real("low_freq_factor", 1e-6, 1e6));
  SDP_ASSIGN_OR_RETURN(rope.high_freq_factor,
                       fields.Real("high_freq_factor", 1e-6, 1e6));
  if (rope.high_freq_factor <= rope.low_freq_factor) {
    return fields.Bad(
        "high_freq_factor",
        absl::StrCat("must be above low_freq_factor = ", rope.low_freq_factor),
        "");
  }
  SDP_ASSIGN_OR_RETURN(
      int64_t original,
      fields.Integer("original_max_position_embeddings", 1, int64_t{1} << 31));
  rope.original_max_position = static_cast<double>(original);
  return absl::OkStatus();
}

bool SameScaling(const RopeConfig& a, const RopeConfig& b) {
  return a.llama3_factor == b.llama3_factor &&
         a.low_freq_factor == b.low_freq_factor &&
         a.high_freq_factor == b.high_freq_factor &&
         a.original_max_position == b.original_max_position;
}

// Null if absent.
absl::StatusOr<const json*> FindObject(const ConfigFields& fields,
                                       absl::string_view name) {
  const json* value = fields.Find(name);
  if (value != nullptr && !value->is_object()) {
    return fields.Bad(
        name, absl::StrCat("must be an object, not ", JsonTypeName(*value)),
        "");
  }
  return value;
}

}  // namespace

absl::StatusOr<RopeConfig> ParseRope(const ConfigFields& fields,
                                     Family family) {
  RopeConfig rope;
  SDP_RETURN_IF_ERROR(RejectPartial(fields));
  SDP_ASSIGN_OR_RETURN(std::optional<double> theta,
                       fields.OptionalReal("rope_theta", 1, kMaxTheta));
  SDP_ASSIGN_OR_RETURN(const json* scaling, FindObject(fields, "rope_scaling"));
  if (scaling != nullptr) {
    ConfigFields inner(*scaling, fields.file(), "rope_scaling.");
    SDP_RETURN_IF_ERROR(ParseScaling(inner, rope));
  }
  SDP_ASSIGN_OR_RETURN(const json* parameters,
                       FindObject(fields, "rope_parameters"));
  if (parameters != nullptr) {
    ConfigFields inner(*parameters, fields.file(), "rope_parameters.");
    for (absl::string_view name : {"full_attention", "sliding_attention"}) {
      if (inner.Find(name) != nullptr) {
        return inner.Bad(name, "rope by layer type is not supported", "");
      }
    }
    RopeConfig newer;
    SDP_RETURN_IF_ERROR(ParseScaling(inner, newer));
    if (scaling != nullptr && !SameScaling(rope, newer)) {
      return fields.Bad("rope_scaling", "contradicts rope_parameters",
                        "keep one of them");
    }
    rope = newer;
    SDP_ASSIGN_OR_RETURN(std::optional<std::string> dtype,
                         inner.OptionalString("inverse_frequency_dtype"));
    if (dtype.has_value() && *dtype != "float32" && *dtype != "bfloat16") {
      return inner.Bad("inverse_frequency_dtype", "unsupported",
                       "use \"float32\" or \"bfloat16\"");
    }
    rope.bf16_inverse_frequencies = dtype == "bfloat16";
    SDP_ASSIGN_OR_RETURN(std::optional<double> inner_theta,
                         inner.OptionalReal("rope_theta", 1, kMaxTheta));
    if (theta.has_value() && inner_theta.has_value() &&
        *theta != *inner_theta) {
      return fields.Bad("rope_theta",
                        absl::StrCat("contradicts rope_parameters.rope_theta "
                                     "= ",
                                     *inner_theta),
                        "keep one of them");
    }
    if (inner_theta.has_value()) theta = inner_theta;
  }
  if (!theta.has_value()) {
    // Llama 1 and 2 were published without it; every other file has it.
    if (family != Family::kLlama) return fields.Missing("rope_theta");
    theta = 10000;
  }
  rope.theta = *theta;
  return rope;
}

// In float32 step by step, as transformers computes it.
std::vector<float> RopeInverseFrequencies(const ModelConfig& config) {
  const RopeConfig& rope = config.rope;
  const auto half = static_cast<size_t>(config.head_dim / 2);
  const auto original = static_cast<float>(rope.original_max_position);
  const auto factor = static_cast<float>(rope.llama3_factor);
  const auto low = static_cast<float>(rope.low_freq_factor);
  const auto high = static_cast<float>(rope.high_freq_factor);
  std::vector<float> frequencies(half);
  for (size_t i = 0; i < half; ++i) {
    float exponent =
        static_cast<float>(2 * i) / static_cast<float>(config.head_dim);
    float f = 1.0f / static_cast<float>(
                         std::pow(rope.theta, static_cast<double>(exponent)));
    if (rope.llama3_factor != 0) {
      float wavelength = 2 * std::numbers::pi_v<float> / f;
      if (wavelength > original / low) {
        f = f / factor;
      } else if (wavelength >= original / high) {
        float t = (original / wavelength - low) / (high - low);
        f = (1 - t) * f / factor + t * f;
      }
    }
    frequencies[i] =
        rope.bf16_inverse_frequencies ? Bf16ToFloat(FloatToBf16Even(f)) : f;
  }
  return frequencies;
}

}  // namespace slidedp::model
