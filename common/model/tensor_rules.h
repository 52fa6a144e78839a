// Which tensors are trained and which decay, by patterns of their names in a
// Hugging Face file.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "common/model/layout.h"

namespace slidedp::model {

struct TensorRules {
  // Tensors without weight decay; unset: transformers' rule, norms and biases.
  std::optional<std::vector<std::string>> no_decay;
  // Tensors that are not trained, as with requires_grad = False in PyTorch: no
  // update, no decay, no moments, no part in the gradient's norm.
  std::vector<std::string> freeze;
};

// '*' stands for any text, '?' for any character, also for a dot. In linear
// space and at most |pattern| * |name| steps, whatever the pattern.
bool MatchesPattern(absl::string_view pattern, absl::string_view name);

// Sets decay and frozen of every tensor, and the hash. An error names a pattern
// that matches no tensor, or says that nothing is left to be trained. A tied
// head goes by the embedding's name, its only one here.
absl::Status ApplyRules(const TensorRules& rules, StateLayout& layout);

}  // namespace slidedp::model
