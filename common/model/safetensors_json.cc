#include "common/model/safetensors_json.h"

#include <cstddef>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/model/strict_json.h"
#include "nlohmann/json.hpp"

namespace slidedp::model {
namespace {

using nlohmann::json;

constexpr size_t kMaxRank = 32;
constexpr absl::string_view kMetadata = "__metadata__";

// {"NAME": {"dtype": "..", "shape": [..], "data_offsets": [b, e]}, ..,
//  "__metadata__": {"KEY": "VALUE", ..}}
// Every callback checks that its event is legal where the reader stands.
class Reader final : public nlohmann::json_sax<json> {
 public:
  explicit Reader(SafetensorsHeader& header) : header_(header) {}

  bool null() override { return Unexpected("null"); }
  bool boolean(bool) override { return Unexpected("a boolean"); }
  bool binary(binary_t&) override { return Unexpected("binary data"); }
  bool number_integer(number_integer_t value) override {
    return Fail(absl::StrCat("negative number ", value));
  }
  bool number_float(number_float_t, const string_t& text) override {
    return Fail(absl::StrCat("number ", Printable(text),
                             " is not an unsigned 64-bit integer"));
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (at_ == At::kShape) {
      if (value > static_cast<uint64_t>(INT64_MAX)) {
        return Fail(absl::StrCat("shape with extent ", value));
      }
      if (entry_.shape.size() == kMaxRank) {
        return Fail(absl::StrCat("more than ", kMaxRank, " dimensions"));
      }
      entry_.shape.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (at_ == At::kOffsets) {
      if (offsets_ == 2) return Fail("data_offsets must be two numbers");
      (offsets_++ == 0 ? entry_.begin : entry_.end) = value;
      return true;
    }
    return Unexpected("a number");
  }

  bool string(string_t& value) override {
    if (at_ == At::kMetadataValue) {
      header_.metadata[key_] = std::move(value);
      at_ = At::kMetadata;
      return true;
    }
    if (at_ == At::kDtype) {
      std::optional<DType> dtype = DTypeFromName(value);
      if (!dtype.has_value()) {
        return Fail(absl::StrCat("unknown dtype \"", Printable(value), "\""));
      }
      entry_.dtype = *dtype;
      at_ = At::kEntry;
      return true;
    }
    return Unexpected("a string");
  }

  bool start_object(size_t) override {
    switch (at_) {
      case At::kStart:
        at_ = At::kRoot;
        return true;
      case At::kRootValue:
        if (entry_.name == kMetadata) {
          if (std::exchange(has_metadata_, true)) return Fail("listed twice");
          at_ = At::kMetadata;
          return true;
        }
        seen_dtype_ = seen_shape_ = seen_offsets_ = false;
        offsets_ = 0;
        at_ = At::kEntry;
        return true;
      default:
        return Unexpected("an object");
    }
  }

  bool key(string_t& name) override {
    switch (at_) {
      case At::kRoot:
        entry_ = TensorEntry{std::move(name), DType::kU8, {}, 0, 0};
        at_ = At::kRootValue;
        return true;
      case At::kMetadata:
        key_ = std::move(name);
        if (header_.metadata.count(key_) != 0) {
          return Fail(absl::StrCat("duplicate key ", Printable(key_)));
        }
        at_ = At::kMetadataValue;
        return true;
      case At::kEntry:
        if (name == "dtype") return Field(seen_dtype_, At::kDtype, name);
        if (name == "shape") return Field(seen_shape_, At::kShapeStart, name);
        if (name == "data_offsets") {
          return Field(seen_offsets_, At::kOffsetsStart, name);
        }
        return Fail(absl::StrCat("unknown field ", Printable(name)));
      default:
        return Unexpected("a key");
    }
  }

  bool start_array(size_t) override {
    if (at_ == At::kShapeStart) {
      at_ = At::kShape;
      return true;
    }
    if (at_ == At::kOffsetsStart) {
      at_ = At::kOffsets;
      return true;
    }
    return Unexpected("an array");
  }

  bool end_array() override {
    if (at_ == At::kOffsets && offsets_ != 2) {
      return Fail("data_offsets must be two numbers");
    }
    at_ = At::kEntry;
    return true;
  }

  bool end_object() override {
    if (at_ == At::kEntry) {
      if (!seen_dtype_ || !seen_shape_ || !seen_offsets_) {
        return Fail("dtype, shape and data_offsets must all be given");
      }
      header_.tensors.push_back(std::move(entry_));
    }
    at_ = at_ == At::kRoot ? At::kDone : At::kRoot;
    return true;
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception&) override {
    entry_.name.clear();
    return Fail(absl::StrCat("header is not valid JSON at byte ", position));
  }

  const std::string& problem() const { return problem_; }
  const std::string& tensor() const { return entry_.name; }

 private:
  enum class At {
    kStart,
    kRoot,
    kRootValue,
    kMetadata,
    kMetadataValue,
    kEntry,
    kDtype,
    kShapeStart,
    kShape,
    kOffsetsStart,
    kOffsets,
    kDone,
  };

  bool Field(bool& seen, At next, const std::string& name) {
    if (std::exchange(seen, true)) {
      return Fail(absl::StrCat("duplicate field ", name));
    }
    at_ = next;
    return true;
  }
  bool Unexpected(absl::string_view what) {
    absl::string_view expected;
    switch (at_) {
      case At::kStart:
        expected = "the header must be an object";
        break;
      case At::kRootValue:
        expected = "an entry must be an object";
        break;
      case At::kMetadataValue:
        expected = "metadata values must be strings";
        break;
      case At::kDtype:
        expected = "dtype must be a string";
        break;
      case At::kShapeStart:
      case At::kShape:
        expected = "shape must be a list of unsigned integers";
        break;
      default:
        expected = "data_offsets must be two unsigned integers";
        break;
    }
    return Fail(absl::StrCat(expected, ", not ", what));
  }
  bool Fail(std::string problem) {
    problem_ = std::move(problem);
    return false;
  }

  SafetensorsHeader& header_;
  At at_ = At::kStart;
  TensorEntry entry_;  // being read
  int offsets_ = 0;
  bool seen_dtype_ = false, seen_shape_ = false, seen_offsets_ = false;
  bool has_metadata_ = false;
  std::string key_, problem_;
};

}  // namespace

absl::Status ParseSafetensorsJson(absl::string_view text,
                                  absl::string_view file,
                                  SafetensorsHeader& header) {
  // The format wants the brace first; the JSON reader would skip a byte order
  // mark or white space.
  if (text.empty() || text.front() != '{') {
    return InvalidInput(file, "", "", "the header does not start with '{'",
                        "the file is no safetensors file");
  }
  Reader reader(header);
  if (!json::sax_parse(text.data(), text.data() + text.size(), &reader)) {
    std::string field =
        reader.tensor().empty()
            ? ""
            : absl::StrCat("tensor ", Printable(reader.tensor()));
    return InvalidInput(file, field, "", reader.problem(), "");
  }
  return absl::OkStatus();
}

}  // namespace slidedp::model
