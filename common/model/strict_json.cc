#include "common/model/strict_json.h"

#include <cstddef>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status.h"

namespace slidedp::model {
namespace {

using nlohmann::json;

constexpr size_t kMaxPrintedBytes = 120;

// First pass: checks what a second, building pass then relies on.
class Checker final : public nlohmann::json_sax<json> {
 public:
  explicit Checker(int max_depth) : max_depth_(max_depth) {}

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }

  bool start_object(size_t) override { return Enter(); }
  bool start_array(size_t) override { return Enter(); }
  bool end_object() override { return Leave(); }
  bool end_array() override { return Leave(); }

  bool key(string_t& name) override {
    if (keys_.back().insert(name).second) return true;
    problem_ = "duplicate key";
    field_ = name;
    return false;
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    problem_ = absl::StrCat("not valid JSON at byte ", position);
    return false;
  }

  const std::string& problem() const { return problem_; }
  const std::string& field() const { return field_; }

 private:
  bool Enter() {
    if (static_cast<int>(keys_.size()) == max_depth_) {
      problem_ = absl::StrCat("nested deeper than ", max_depth_, " levels");
      return false;
    }
    keys_.emplace_back();
    return true;
  }
  bool Leave() {
    keys_.pop_back();
    return true;
  }

  int max_depth_;
  std::vector<absl::flat_hash_set<std::string>> keys_;
  std::string problem_, field_;
};

}  // namespace

std::string Printable(absl::string_view text) {
  bool cut = text.size() > kMaxPrintedBytes;
  if (cut) text = text.substr(0, kMaxPrintedBytes);
  return absl::StrCat(absl::CHexEscape(text), cut ? "..." : "");
}

std::string Describe(const json& value) {
  switch (value.type()) {
    case json::value_t::object:
      return absl::StrCat("{", value.size(), " members}");
    case json::value_t::array:
      return absl::StrCat("[", value.size(), " items]");
    case json::value_t::string:
      return absl::StrCat("\"", Printable(value.get_ref<const std::string&>()),
                          "\"");
    default:
      return value.dump();
  }
}

absl::string_view JsonTypeName(const json& value) {
  switch (value.type()) {
    case json::value_t::null:
      return "null";
    case json::value_t::object:
      return "an object";
    case json::value_t::array:
      return "an array";
    case json::value_t::string:
      return "a string";
    case json::value_t::boolean:
      return "a boolean";
    case json::value_t::number_integer:
    case json::value_t::number_unsigned:
      return "an integer";
    case json::value_t::number_float:
      return "a real number";
    default:
      return "an unknown type";
  }
}

absl::StatusOr<json> ParseStrictJson(absl::string_view text,
                                     absl::string_view file, int max_depth) {
  const char* begin = text.data();
  const char* end = begin + text.size();
  Checker checker(max_depth);
  if (!json::sax_parse(begin, end, &checker)) {
    return InvalidInput(file, Printable(checker.field()), "", checker.problem(),
                        "");
  }
  json value = json::parse(begin, end, nullptr, /*allow_exceptions=*/false);
  SDP_CHECK(!value.is_discarded(), "the checker accepted invalid JSON");
  return value;
}

}  // namespace slidedp::model
