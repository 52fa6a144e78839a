// What a model folder's config.json says, for the dense Llama-like families:
// qwen2, qwen3, llama (with llama3 rope scaling), mistral (with sliding
// window). Both generations of config files are read (transformers 4 and 5).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace slidedp::model {

enum class Family { kLlama, kMistral, kQwen2, kQwen3 };
absl::string_view FamilyName(Family family);

struct RopeConfig {
  double theta = 10000;
  // llama3 frequency scaling; factor 0: none.
  double llama3_factor = 0;
  double low_freq_factor = 0;
  double high_freq_factor = 0;
  double original_max_position = 0;
  // rope_parameters.inverse_frequency_dtype = "bfloat16": inverse frequencies
  // are rounded to BF16, as in a model that was cast to BF16 as a whole, this
  // buffer included. transformers keeps them in float32 when it loads a model.
  bool bf16_inverse_frequencies = false;
};

struct ModelConfig {
  Family family = Family::kLlama;
  int64_t hidden = 0;
  int64_t layers = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t intermediate = 0;
  int64_t vocab = 0;
  int64_t max_position = 0;
  double rms_eps = 0;
  RopeConfig rope;
  bool tied = false;      // the head is the embedding
  bool qkv_bias = false;  // qwen2
  bool qk_norm = false;   // qwen3
  // Per layer: keys a query sees, itself included; 0: all before it.
  std::vector<int64_t> window;

  int64_t q_dim() const { return heads * head_dim; }
  int64_t kv_dim() const { return kv_heads * head_dim; }
  int64_t qkv_dim() const { return q_dim() + 2 * kv_dim(); }
};

// `json` is hostile. `file` is for messages. Unknown architectures, quantised
// repositories, unsupported rope types, biases we do not compute and
// inconsistent dimensions are errors that say so.
absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view json,
                                             absl::string_view file);

// cos and sin inverse frequencies of the rope, head_dim / 2 values
// (models.md section 1; llama3 scaling included).
std::vector<float> RopeInverseFrequencies(const ModelConfig& config);

}  // namespace slidedp::model
