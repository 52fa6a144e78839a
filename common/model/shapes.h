// Dimensions of published dense models by name, and the model FLOPs of a step:
// what benchmarks train, and what they count.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/model/config.h"

namespace slidedp::model {

// Values of the published config.json.
struct Shape {
  std::string name;  // "qwen3-8b"
  Family family;
  int64_t hidden, layers, heads, kv_heads, head_dim, intermediate, vocab;
  int64_t max_position;
  double rms_eps, rope_theta;
  double llama3_factor;  // of the rope; 0: none
  bool tied;
};

const std::vector<Shape>& PublishedShapes();
// NotFound names all of them.
absl::StatusOr<Shape> FindShape(absl::string_view name);
// The text of a config.json.
std::string ConfigJson(const Shape& shape);

// Model FLOPs of one optimizer step: forward 2, backward 4 per weight of a
// matrix product and token; attention causal, half of the square. Not counted:
// embedding lookup, norms, rope, softmax, optimizer, recomputation; a sliding
// window is counted as full. So FLOPs / time / GPUs is the numerator of an MFU,
// not a hardware rate.
struct StepFlops {
  double dense;      // 6 * tokens * layers * weights of a layer's products
  double head;       // 6 * tokens * hidden * vocab, tied or not
  double attention;  // 6 * tokens * layers * sequence * heads * head_dim

  double total() const { return dense + head + attention; }
};
StepFlops ModelFlops(const ModelConfig& config, double tokens,
                     double sequence_length);

}  // namespace slidedp::model
