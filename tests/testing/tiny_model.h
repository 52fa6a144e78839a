// Small random Hugging Face model folders, and token datasets to train them on.
#pragma once

#include <cstdint>
#include <string>

#include "common/model/config.h"
#include "common/model/safetensors.h"

namespace slidedp::testing {

struct TinyModelOptions {
  model::Family family = model::Family::kQwen3;
  bool tied = false;
  int64_t hidden = 64;
  int64_t layers = 2;
  int64_t heads = 4;
  int64_t kv_heads = 2;
  int64_t head_dim = 16;
  int64_t intermediate = 128;
  int64_t vocab = 256;
  int64_t max_position = 512;
  // Sliding window of every layer; 0: full attention. Not for llama.
  int64_t window = 0;
  // Factor 8, low 1, high 4, original 64.
  bool llama3_rope = false;
  // Writes rope_theta, rope_scaling and torch_dtype, as transformers 4 does,
  // instead of rope_parameters and dtype.
  bool old_config = false;
  model::DType dtype = model::DType::kBf16;  // or kF16, kF32
  int shards = 1;                            // above 1: with an index
  // A tied model whose file holds lm_head.weight too.
  bool extra_head = false;
  // Tensor data starts at an odd byte of the file.
  bool unaligned = false;
  uint64_t seed = 1;
};

// The text of its config.json.
std::string TinyConfigJson(const TinyModelOptions& options);
// Parsed; aborts if the options make no valid model.
model::ModelConfig TinyConfig(const TinyModelOptions& options);

// Makes `folder` (which may exist) and writes config.json,
// generation_config.json, tokenizer files and the weights: matrices
// N(0, 0.02), norms about 1 and biases about 0, both moved away from those
// values. The same options give the same bytes. Aborts on failure.
void WriteTinyModel(const std::string& folder, const TinyModelOptions& options);

struct TokenDatasetOptions {
  uint64_t tokens = 4096;
  uint64_t documents = 16;  // of random, non-zero lengths
  int64_t vocab = 256;
  bool stream = true;  // else "documents"
  // Which tokens are labels: all, a random half, or all but the first third of
  // each document (as when a prompt is masked).
  enum class Mask { kAll, kRandomHalf, kPrompt } mask = Mask::kAll;
  uint64_t masked_documents = 0;  // the first so many have no label at all
  uint64_t seed = 1;
};

// A file as worker/data/dataset.h reads it. Aborts on failure.
void WriteTokenDataset(const std::string& path,
                       const TokenDatasetOptions& options);

}  // namespace slidedp::testing
