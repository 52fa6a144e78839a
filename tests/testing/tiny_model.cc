#include "tests/testing/tiny_model.h"

#include <fcntl.h>

#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/bf16.h"
#include "common/base/check.h"
#include "common/base/fd.h"
#include "common/model/layout.h"
#include "nlohmann/json.hpp"
#include "tests/testing/half.h"
#include "tests/testing/random.h"

namespace slidedp::testing {
namespace {

using model::DType;
using model::Family;
using model::Role;
using nlohmann::json;

const char* ArchitectureName(Family family) {
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
  SDP_CHECK(false, "unknown family");
}

const char* TorchName(DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return "bfloat16";
    case DType::kF16:
      return "float16";
    case DType::kF32:
      return "float32";
    default:
      SDP_CHECK(false, "tiny models are BF16, F16 or F32");
  }
}

void WriteOrAbort(const std::string& path, const std::string& contents) {
  auto fd = OpenFile(path, O_WRONLY | O_CREAT | O_TRUNC);
  SDP_CHECK(fd.ok(), fd.status().ToString());
  absl::Status status =
      PwriteFully(fd->get(), contents.data(), contents.size(), 0, path);
  SDP_CHECK(status.ok(), status.ToString());
}

float Value(Role role, Random& random) {
  switch (role) {
    case Role::kInputNorm:
    case Role::kPostNorm:
    case Role::kFinalNorm:
    case Role::kQNorm:
    case Role::kKNorm:
      return static_cast<float>(random.Uniform(0.8, 1.2));
    case Role::kQBias:
    case Role::kKBias:
    case Role::kVBias:
      return static_cast<float>(0.1 * random.Normal());
    default:
      return static_cast<float>(0.02 * random.Normal());
  }
}

void Append(float value, DType dtype, std::string& bytes) {
  if (dtype == DType::kF32) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
    return;
  }
  uint16_t half =
      dtype == DType::kBf16 ? FloatToBf16Even(value) : FloatToHalf(value);
  bytes.append(reinterpret_cast<const char*>(&half), sizeof(half));
}

struct Stored {
  model::TensorEntry entry;
  std::string bytes;
};

std::vector<Stored> MakeTensors(const TinyModelOptions& options) {
  model::StateLayout layout = model::MakeStateLayout(TinyConfig(options));
  Random random(options.seed);
  std::vector<Stored> tensors;
  for (const model::Unit& unit : layout.units) {
    for (const model::Tensor& tensor : unit.tensors) {
      Stored stored{{tensor.name, options.dtype, tensor.shape, 0, 0}, ""};
      for (uint64_t i = 0; i < tensor.count; ++i) {
        Append(Value(tensor.role, random), options.dtype, stored.bytes);
      }
      tensors.push_back(std::move(stored));
    }
  }
  if (options.extra_head) {
    SDP_CHECK(options.tied, "extra_head is for tied models");
    Stored head = tensors.front();
    head.entry.name = model::kHeadName;
    tensors.push_back(std::move(head));
  }
  return tensors;
}

void WriteShard(const std::string& path, const std::vector<Stored>& tensors,
                bool unaligned) {
  std::vector<model::TensorEntry> entries;
  for (const Stored& stored : tensors) entries.push_back(stored.entry);
  std::string bytes =
      model::EncodeSafetensorsHeader(entries, {{"format", "pt"}});
  if (unaligned) {
    bytes += ' ';  // the header may end in spaces
    uint64_t length = bytes.size() - 8;
    std::memcpy(bytes.data(), &length, sizeof(length));
  }
  for (const Stored& stored : tensors) bytes += stored.bytes;
  WriteOrAbort(path, bytes);
}

}  // namespace

std::string TinyConfigJson(const TinyModelOptions& o) {
  json config = {
      {"architectures", {ArchitectureName(o.family)}},
      {"model_type", std::string(model::FamilyName(o.family))},
      {"hidden_act", "silu"},
      {"hidden_size", o.hidden},
      {"num_hidden_layers", o.layers},
      {"num_attention_heads", o.heads},
      {"num_key_value_heads", o.kv_heads},
      {"head_dim", o.head_dim},
      {"intermediate_size", o.intermediate},
      {"vocab_size", o.vocab},
      {"max_position_embeddings", o.max_position},
      {"rms_norm_eps", 1e-6},
      {"tie_word_embeddings", o.tied},
      {"attention_dropout", 0.0},
      {"bos_token_id", 1},
      {"eos_token_id", 2},
  };
  json rope = {{"rope_type", "default"}};
  if (o.llama3_rope) {
    rope = {{"rope_type", "llama3"},
            {"factor", 8.0},
            {"low_freq_factor", 1.0},
            {"high_freq_factor", 4.0},
            {"original_max_position_embeddings", 64}};
  }
  if (o.old_config) {
    config["torch_dtype"] = TorchName(o.dtype);
    config["rope_theta"] = 10000.0;
    config["rope_scaling"] = o.llama3_rope ? rope : json();
  } else {
    config["dtype"] = TorchName(o.dtype);
    rope["rope_theta"] = 10000.0;
    config["rope_parameters"] = rope;
  }
  if (o.family == Family::kLlama) {
    SDP_CHECK(o.window == 0, "llama has no sliding window");
    config["mlp_bias"] = false;
  } else {
    config["sliding_window"] = o.window == 0 ? json() : json(o.window);
  }
  if (o.family == Family::kQwen2 || o.family == Family::kQwen3) {
    config["use_sliding_window"] = o.window != 0;
    config["max_window_layers"] = 0;
  }
  return config.dump(2) + "\n";
}

model::ModelConfig TinyConfig(const TinyModelOptions& options) {
  auto config =
      model::ParseModelConfig(TinyConfigJson(options), "tiny config.json");
  SDP_CHECK(config.ok(), config.status().ToString());
  return *std::move(config);
}

void WriteTinyModel(const std::string& folder,
                    const TinyModelOptions& options) {
  std::filesystem::create_directories(folder);
  auto in_folder = [&](absl::string_view name) {
    return absl::StrCat(folder, "/", name);
  };
  WriteOrAbort(in_folder("config.json"), TinyConfigJson(options));
  WriteOrAbort(in_folder("generation_config.json"),
               "{\"bos_token_id\": 1, \"eos_token_id\": 2}\n");
  WriteOrAbort(in_folder("tokenizer.json"), "{\"version\": \"1.0\"}\n");
  WriteOrAbort(in_folder("tokenizer_config.json"),
               "{\"model_max_length\": 512}\n");

  std::vector<Stored> tensors = MakeTensors(options);
  SDP_CHECK(options.shards >= 1 &&
                static_cast<size_t>(options.shards) <= tensors.size(),
            "shards must be 1 to the number of tensors");
  if (options.shards == 1) {
    WriteShard(in_folder("model.safetensors"), tensors, options.unaligned);
    return;
  }
  // Dealt round robin, so that every layer straddles shards.
  std::vector<std::vector<Stored>> shards(options.shards);
  for (size_t i = 0; i < tensors.size(); ++i) {
    shards[i % shards.size()].push_back(tensors[i]);
  }
  json weight_map;
  uint64_t total_bytes = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    std::string name =
        absl::StrFormat("model-%05d-of-%05d.safetensors", i + 1, shards.size());
    for (const Stored& stored : shards[i]) {
      weight_map[stored.entry.name] = name;
      total_bytes += stored.bytes.size();
    }
    WriteShard(in_folder(name), shards[i], options.unaligned);
  }
  json index = {{"metadata", {{"total_size", total_bytes}}},
                {"weight_map", weight_map}};
  WriteOrAbort(in_folder("model.safetensors.index.json"), index.dump(2));
}

}  // namespace slidedp::testing
