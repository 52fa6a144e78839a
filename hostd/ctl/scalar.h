// Strict readings of YAML scalars: no truncation, no wrap-around, no text that
// happens to begin with a number. The caller puts file and field around the
// problem.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "hostd/ctl/yaml_tree.h"

namespace slidedp::ctl {

// What is wrong with a value and what to write instead.
struct Problem {
  std::string what;
  std::string remedy;
};

struct RealRange {
  double low, high;
  bool open_low = false;   // low itself is excluded
  bool open_high = false;  // high itself is excluded
};

std::optional<Problem> ReadReal(const YamlNode& node, const RealRange& range,
                                absl::string_view example, double& out);
std::optional<Problem> ReadInteger(const YamlNode& node, uint64_t low,
                                   uint64_t high, absl::string_view example,
                                   uint64_t& out);
// Non-empty, at most `max_bytes`. A number or `true` is taken as its text.
std::optional<Problem> ReadText(const YamlNode& node, size_t max_bytes,
                                std::string& out);
// The index of the word in `words`; case matters.
std::optional<Problem> ReadWord(const YamlNode& node,
                                const std::vector<std::string>& words,
                                size_t& out);

// The word nearest to `word` in edit distance, if it is near enough to be what
// was meant.
std::optional<std::string> Nearest(absl::string_view word,
                                   const std::vector<std::string>& words);

}  // namespace slidedp::ctl
