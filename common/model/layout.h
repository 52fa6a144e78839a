// Units, tensors and planes of a model's host state: a pure function of its
// config, computed alike by daemon, workers and tools.
//
// Units in order: embedding, decoder layers, head (final norm + lm_head). A
// tied model has no head unit; its final norm lies in the embedding unit, after
// the table, and the embedding unit's gradient is complete only after both
// uses. In a unit, tensors lie in a fixed order: q, k, v adjacent (weights,
// then biases), gate, up adjacent, so that each group is one GEMM. Every group
// starts at a multiple of 128 elements.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/model/config.h"

namespace slidedp::model {

enum class Role {
  kEmbedding,
  kInputNorm,
  kQ,
  kK,
  kV,
  kQBias,
  kKBias,
  kVBias,
  kQNorm,
  kKNorm,
  kO,
  kPostNorm,
  kGate,
  kUp,
  kDown,
  kFinalNorm,
  kHead,
};

// The head's weight, in a file; a tied model's file may hold it too.
inline constexpr char kHeadName[] = "lm_head.weight";

struct Tensor {
  std::string name;  // as in a Hugging Face file
  Role role;
  std::vector<int64_t> shape;
  uint64_t offset;  // elements from the unit's start
  uint64_t count;   // elements
  // Weight decay applies; transformers' rule: not to norms and biases.
  bool decay;
  bool frozen = false;  // not trained (tensor_rules.h)
};

enum class UnitKind { kEmbedding, kDecoder, kHead };
absl::string_view UnitKindName(UnitKind kind);

struct Unit {
  UnitKind kind;
  int64_t layer;  // of kDecoder; -1 otherwise
  std::vector<Tensor> tensors;
  // Elements from the unit's start to its last tensor's end, a multiple of 128.
  uint64_t count;
  // Elements from the start of every plane; multiples of kUnitAlignment.
  uint64_t plane_offset;

  const Tensor& tensor(Role role) const;  // must exist
  bool has(Role role) const;
  // All of it: no gradient leaves the device.
  bool frozen() const;
};

// 2 MiB of a BF16 plane.
inline constexpr uint64_t kUnitAlignment = uint64_t{1} << 20;

struct StateLayout {
  std::vector<Unit> units;
  uint64_t plane_elements;         // all units, padding included
  uint64_t parameters;             // elements, padding excluded
  uint64_t frozen_parameters = 0;  // of them
  uint64_t hash;                   // HashOf it

  int embedding_unit() const { return 0; }
  // The unit that holds the head's weight: the last one, or 0 when tied.
  int head_unit() const;
  bool tied() const { return head_unit() == 0; }
  // The last layer that a backward pass comes to: below it nothing is trained.
  int lowest_trained_layer() const;
  int decoder_unit(int64_t layer) const { return static_cast<int>(1 + layer); }
};

// Everything is trained; decay is transformers' rule.
StateLayout MakeStateLayout(const ModelConfig& config);
uint64_t HashOf(const StateLayout& layout);

}  // namespace slidedp::model
