// Dimensions and parameter counts of published dense models. The counts are
// those of the repositories, not of our code.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace slidedp::model {

struct Published {
  std::string name, model_type, architecture;
  int64_t hidden, layers, heads, kv_heads, head_dim, intermediate, vocab;
  bool tied;
  uint64_t layer_parameters, parameters;

  // head_dim is left out where published files leave it out.
  std::string ConfigJson() const {
    return absl::StrCat(
        R"({"architectures": [")", architecture, R"("], "model_type": ")",
        model_type, R"(", "hidden_act": "silu", "hidden_size": )", hidden,
        R"(, "num_hidden_layers": )", layers, R"(, "num_attention_heads": )",
        heads, R"(, "num_key_value_heads": )", kv_heads,
        hidden == heads * head_dim
            ? ""
            : absl::StrCat(R"(, "head_dim": )", head_dim),
        R"(, "intermediate_size": )", intermediate, R"(, "vocab_size": )",
        vocab, R"(, "max_position_embeddings": 32768, "rms_norm_eps": 1e-05,)",
        R"("rope_theta": 1000000, "tie_word_embeddings": )",
        tied ? "true" : "false", "}");
  }
};

inline std::vector<Published> AllPublished() {
  const char *q2 = "qwen2", *q2a = "Qwen2ForCausalLM";
  const char *q3 = "qwen3", *q3a = "Qwen3ForCausalLM";
  const char *ll = "llama", *lla = "LlamaForCausalLM";
  const char *mi = "mistral", *mia = "MistralForCausalLM";
  return {
      {"Qwen2_5_0_5B", q2, q2a, 896, 24, 14, 2, 64, 4864, 151936, true,
       14'912'384, 494'032'768},
      {"Qwen2_5_1_5B", q2, q2a, 1536, 28, 12, 2, 128, 8960, 151936, true,
       46'797'824, 1'543'714'304},
      {"Qwen2_5_3B", q2, q2a, 2048, 36, 16, 2, 128, 11008, 151936, true,
       77'076'992, 3'085'938'688},
      {"Qwen2_5_7B", q2, q2a, 3584, 28, 28, 4, 128, 18944, 152064, false,
       233'057'792, 7'615'616'512},
      {"Qwen2_5_14B", q2, q2a, 5120, 48, 40, 8, 128, 13824, 152064, false,
       275'268'608, 14'770'033'664},
      {"Qwen2_5_32B", q2, q2a, 5120, 64, 40, 8, 128, 27648, 152064, false,
       487'605'248, 32'763'876'352},
      {"Qwen2_5_72B", q2, q2a, 8192, 80, 64, 8, 128, 29568, 152064, false,
       877'684'736, 72'706'203'648},
      {"Qwen3_0_6B", q3, q3a, 1024, 28, 16, 8, 128, 3072, 151936, true,
       15'730'944, 596'049'920},
      {"Qwen3_1_7B", q3, q3a, 2048, 28, 16, 8, 128, 6144, 151936, true,
       50'336'000, 1'720'574'976},
      {"Qwen3_4B", q3, q3a, 2560, 36, 32, 8, 128, 9728, 151936, true,
       100'930'816, 4'022'468'096},
      {"Qwen3_8B", q3, q3a, 4096, 36, 32, 8, 128, 12288, 151936, false,
       192'946'432, 8'190'735'360},
      {"Qwen3_14B", q3, q3a, 5120, 40, 40, 8, 128, 17408, 151936, false,
       330'311'936, 14'768'307'200},
      {"Qwen3_32B", q3, q3a, 5120, 64, 64, 8, 128, 25600, 151936, false,
       487'598'336, 32'762'123'264},
      {"Llama_3_2_1B", ll, lla, 2048, 16, 32, 8, 64, 8192, 128256, true,
       60'821'504, 1'235'814'400},
      {"Llama_3_2_3B", ll, lla, 3072, 28, 24, 8, 128, 8192, 128256, true,
       100'669'440, 3'212'749'824},
      {"Llama_3_8B", ll, lla, 4096, 32, 32, 8, 128, 14336, 128256, false,
       218'112'000, 8'030'261'248},
      {"Llama_3_70B", ll, lla, 8192, 80, 64, 8, 128, 28672, 128256, false,
       855'654'400, 70'553'706'496},
      {"Llama_3_1_405B", ll, lla, 16384, 126, 128, 8, 128, 53248, 128256, false,
       3'187'703'808, 405'853'388'800},
      {"Mistral_7B_v0_3", mi, mia, 4096, 32, 32, 8, 128, 14336, 32768, false,
       218'112'000, 7'248'023'552},
      {"Mistral_Small_24B", mi, mia, 5120, 40, 32, 8, 128, 32768, 131072, false,
       555'755'520, 23'572'403'200},
  };
}

inline void PrintTo(const Published& model, std::ostream* out) {
  *out << model.name;
}

}  // namespace slidedp::model
