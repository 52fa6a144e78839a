// Every op of a decoder, the embedding and the loss head, at a model's shape,
// on operands of its own: what is timed alone.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/model/config.h"
#include "worker/bench/machine.h"

namespace slidedp::bench {

enum class OpKind { kGemm, kAttention, kOther };

struct Op {
  std::string name;  // "gate_up.forward"
  OpKind kind = OpKind::kOther;
  // Of matrix products (attention: causal half; its backward pass has five,
  // one of them the scores again). 0: bound by memory.
  double flops = 0;
  // What the op must read and write, if flops is 0.
  double bytes = 0;
  // It runs once in a layer's forward (backward) pass without recomputation.
  bool layer_forward = false;
  bool layer_backward = false;
  std::function<absl::Status()> work;
};

struct OpShape {
  int64_t batch = 1;  // sequences of a micro-batch
  int64_t sequence = 1;
  int64_t head_rows = 1;  // tokens whose logits exist at once

  int64_t tokens() const { return batch * sequence; }
};

// The matrix products and attention of one decoder layer (`window` of layer
// 0), forward and backward.
absl::StatusOr<std::vector<Op>> LayerProducts(Machine& machine,
                                              const model::ModelConfig& config,
                                              const OpShape& shape);
// Norms, rope, activation, embedding, head and casts.
absl::StatusOr<std::vector<Op>> OtherOps(Machine& machine,
                                         const model::ModelConfig& config,
                                         const OpShape& shape);

}  // namespace slidedp::bench
