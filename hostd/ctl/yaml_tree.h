// A small, bounded YAML tree for job files. Built from yaml-cpp's events, not
// from its nodes: every key keeps its line, a key given twice is an error, and
// what a job file has no use for (anchors, aliases, tags, several documents,
// deep nesting) is refused before it can cost anything.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace slidedp::ctl {

inline constexpr uint64_t kMaxYamlBytes = 64 * 1024;
inline constexpr int kMaxYamlDepth = 8;
inline constexpr int kMaxYamlNodes = 4096;

struct YamlMember;

struct YamlNode {
  enum class Kind { kNull, kScalar, kMap, kSequence };

  Kind kind = Kind::kNull;
  std::string text;                 // kScalar
  bool quoted = false;              // kScalar: in quotes, hence a string
  int line = 0;                     // 1-based; 0: given on the command line
  std::vector<YamlMember> members;  // kMap, in file order, keys distinct
  std::vector<YamlNode> items;      // kSequence

  const YamlNode* Find(absl::string_view key) const;
};

struct YamlMember {
  std::string key;
  int line = 0;
  YamlNode value;
};

// The one document of `text` (kNull if there is none). `source` is for
// messages.
absl::StatusOr<YamlNode> ParseYaml(absl::string_view text,
                                   absl::string_view source);

// The value for a message: its text, "null", "{...}" or "[...]"; long text is
// cut, control characters are replaced.
std::string Describe(const YamlNode& node);
// `text` without control characters, cut to `max_bytes`.
std::string Printable(absl::string_view text, size_t max_bytes);

}  // namespace slidedp::ctl
