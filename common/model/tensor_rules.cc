#include "common/model/tensor_rules.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"

namespace slidedp::model {
namespace {

bool MatchesAny(const std::vector<std::string>& patterns,
                const std::string& name) {
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const std::string& pattern) {
                       return MatchesPattern(pattern, name);
                     });
}

absl::Status CheckPatterns(absl::string_view field,
                           const std::vector<std::string>& patterns,
                           const StateLayout& layout) {
  for (const std::string& pattern : patterns) {
    const bool used = std::any_of(
        layout.units.begin(), layout.units.end(), [&](const Unit& unit) {
          return std::any_of(unit.tensors.begin(), unit.tensors.end(),
                             [&](const Tensor& tensor) {
                               return MatchesPattern(pattern, tensor.name);
                             });
        });
    if (used) continue;
    const bool tied_head = layout.tied() && MatchesPattern(pattern, kHeadName);
    return InvalidInput(
        "", field, pattern, "matches no tensor of the model",
        tied_head
            ? absl::StrCat("the head is tied: name ",
                           layout.units[0].tensors[0].name)
            : absl::StrCat("write names as ", layout.units[1].tensors[0].name,
                           ", with * for any text and ? for a character"));
  }
  return absl::OkStatus();
}

}  // namespace

bool MatchesPattern(absl::string_view pattern, absl::string_view name) {
  size_t p = 0, n = 0;
  // Where to go on after the last '*' if what follows it does not match.
  size_t star = absl::string_view::npos, retry = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      retry = n;
    } else if (p < pattern.size() &&
               (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p, ++n;
    } else if (star != absl::string_view::npos) {
      p = star + 1;
      n = ++retry;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

absl::Status ApplyRules(const TensorRules& rules, StateLayout& layout) {
  SDP_RETURN_IF_ERROR(CheckPatterns("freeze", rules.freeze, layout));
  if (rules.no_decay) {
    SDP_RETURN_IF_ERROR(
        CheckPatterns("optimizer.no_decay", *rules.no_decay, layout));
  }
  layout.frozen_parameters = 0;
  for (Unit& unit : layout.units) {
    for (Tensor& tensor : unit.tensors) {
      if (rules.no_decay)
        tensor.decay = !MatchesAny(*rules.no_decay, tensor.name);
      tensor.frozen = MatchesAny(rules.freeze, tensor.name);
      if (tensor.frozen) layout.frozen_parameters += tensor.count;
    }
  }
  if (layout.frozen_parameters == layout.parameters) {
    return InvalidInput("", "freeze", rules.freeze[0],
                        "with the other patterns leaves nothing to be trained",
                        "freeze fewer tensors");
  }
  layout.hash = HashOf(layout);
  return absl::OkStatus();
}

}  // namespace slidedp::model
