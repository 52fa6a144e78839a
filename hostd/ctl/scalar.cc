#include "hostd/ctl/scalar.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace slidedp::ctl {
namespace {

std::string RangeText(const RealRange& range) {
  return absl::StrCat(range.open_low ? "> " : ">= ", range.low, " and ",
                      range.open_high ? "< " : "<= ", range.high);
}

// Digits, sign, point and exponent only: strtod would also take "0x1p3",
// "nan" and "infinity".
bool LooksLikeNumber(absl::string_view text) {
  return !text.empty() && text.size() <= 64 &&
         text.find_first_not_of("0123456789+-.eE") == absl::string_view::npos;
}

std::optional<Problem> NotAPlainScalar(const YamlNode& node,
                                       absl::string_view wanted,
                                       absl::string_view example) {
  std::string remedy = absl::StrCat("give ", wanted, ", e.g. ", example);
  if (node.kind == YamlNode::Kind::kNull) {
    return Problem{"has no value", remedy};
  }
  if (node.kind != YamlNode::Kind::kScalar) {
    return Problem{absl::StrCat("not ", wanted), remedy};
  }
  if (node.quoted) {
    return Problem{absl::StrCat("text in quotes, not ", wanted),
                   "remove the quotes"};
  }
  return std::nullopt;
}

}  // namespace

std::optional<Problem> ReadReal(const YamlNode& node, const RealRange& range,
                                absl::string_view example, double& out) {
  if (auto problem = NotAPlainScalar(node, "a number", example)) return problem;
  double value = 0;
  if (!LooksLikeNumber(node.text) || !absl::SimpleAtod(node.text, &value) ||
      !std::isfinite(value)) {
    return Problem{"not a finite number",
                   absl::StrCat("give a number, e.g. ", example)};
  }
  if (value < range.low || value > range.high ||
      (range.open_low && value == range.low) ||
      (range.open_high && value == range.high)) {
    return Problem{"out of range",
                   absl::StrCat("give a number ", RangeText(range))};
  }
  out = value;
  return std::nullopt;
}

std::optional<Problem> ReadInteger(const YamlNode& node, uint64_t low,
                                   uint64_t high, absl::string_view example,
                                   uint64_t& out) {
  if (auto problem = NotAPlainScalar(node, "a whole number", example)) {
    return problem;
  }
  bool digits = !node.text.empty() &&
                node.text.find_first_not_of("0123456789") == std::string::npos;
  if (!digits) {
    bool negative =
        node.text.size() > 1 && node.text[0] == '-' &&
        node.text.find_first_not_of("0123456789", 1) == std::string::npos;
    if (!negative) {
      return Problem{"not a whole number",
                     absl::StrCat("give digits only, e.g. ", example)};
    }
  }
  uint64_t value = 0;
  if (!digits || !absl::SimpleAtoi(node.text, &value) || value < low ||
      value > high) {
    return Problem{"out of range", absl::StrCat("give a whole number from ",
                                                low, " to ", high)};
  }
  out = value;
  return std::nullopt;
}

std::optional<Problem> ReadText(const YamlNode& node, size_t max_bytes,
                                std::string& out) {
  if (node.kind == YamlNode::Kind::kNull ||
      (node.kind == YamlNode::Kind::kScalar && node.text.empty())) {
    return Problem{"has no value", "give a text"};
  }
  if (node.kind != YamlNode::Kind::kScalar) {
    return Problem{"not a text", "give one text"};
  }
  if (node.text.size() > max_bytes) {
    return Problem{absl::StrCat("longer than ", max_bytes, " bytes"),
                   "shorten it"};
  }
  out = node.text;
  return std::nullopt;
}

std::optional<Problem> ReadWord(const YamlNode& node,
                                const std::vector<std::string>& words,
                                size_t& out) {
  std::string choices =
      absl::StrCat("give one of ", absl::StrJoin(words, ", "));
  if (node.kind != YamlNode::Kind::kScalar) {
    return Problem{
        node.kind == YamlNode::Kind::kNull ? "has no value" : "not a word",
        choices};
  }
  auto found = std::find(words.begin(), words.end(), node.text);
  if (found == words.end()) return Problem{"not a known word", choices};
  out = found - words.begin();
  return std::nullopt;
}

std::optional<std::string> Nearest(absl::string_view word,
                                   const std::vector<std::string>& words) {
  constexpr size_t kMaxLength = 64;
  if (word.empty() || word.size() > kMaxLength) return std::nullopt;
  std::optional<std::string> best;
  size_t best_distance = 1 + std::max<size_t>(1, word.size() / 3);
  for (const std::string& candidate : words) {
    // Levenshtein distance, one row at a time.
    std::vector<size_t> row(candidate.size() + 1);
    std::iota(row.begin(), row.end(), size_t{0});
    for (size_t i = 1; i <= word.size(); ++i) {
      size_t diagonal = row[0];
      row[0] = i;
      for (size_t j = 1; j <= candidate.size(); ++j) {
        size_t replaced = diagonal + (word[i - 1] == candidate[j - 1] ? 0 : 1);
        diagonal = row[j];
        row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
      }
    }
    if (row.back() < best_distance) {
      best_distance = row.back();
      best = candidate;
    }
  }
  return best;
}

}  // namespace slidedp::ctl
