#include "tests/hostile/mutations.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace slidedp::testing {
namespace {

using nlohmann::json;

const std::vector<std::string>& Tokens() {
  static const std::vector<std::string> tokens = {"{",
                                                  "}",
                                                  "[",
                                                  "]",
                                                  ":",
                                                  ",",
                                                  "\"",
                                                  "\\",
                                                  "\\u0000",
                                                  "\\ud800",
                                                  "null",
                                                  "true",
                                                  "-1",
                                                  "0",
                                                  "-0",
                                                  "1e999",
                                                  "1e-999",
                                                  "0.5",
                                                  "NaN",
                                                  "Infinity",
                                                  "9223372036854775807",
                                                  "9223372036854775808",
                                                  "18446744073709551615",
                                                  "18446744073709551616",
                                                  "-9223372036854775809",
                                                  "4294967296",
                                                  std::string("\0", 1),
                                                  "\xff",
                                                  "\xc0\x80",
                                                  "\xed\xa0\x80",
                                                  "\xef\xbb\xbf",
                                                  "\n",
                                                  "//",
                                                  "__metadata__",
                                                  "data_offsets",
                                                  "\"x\":{},",
                                                  "\"dtype\"",
                                                  "hidden_size",
                                                  std::string(200, '['),
                                                  std::string(5000, '{'),
                                                  std::string(3000, '9'),
                                                  std::string(300, 'A')};
  return tokens;
}

void Edit(std::string& bytes, Random& random) {
  if (bytes.empty()) {
    bytes = Tokens()[random.Below(Tokens().size())];
    return;
  }
  size_t at = random.Below(bytes.size());
  size_t length = std::min<size_t>(1 + random.Below(16), bytes.size() - at);
  switch (random.Below(10)) {
    case 0:
    case 1:
      bytes[at] = static_cast<char>(bytes[at] ^ (1 << random.Below(8)));
      break;
    case 2:
      bytes[at] = static_cast<char>(random.Below(256));
      break;
    case 3:
      bytes.erase(at, length);
      break;
    case 4:
      bytes.insert(at, bytes.substr(at, length));
      break;
    case 5:
      bytes.insert(random.Below(bytes.size()), bytes.substr(at, length));
      break;
    case 6:
      bytes.resize(at);
      break;
    case 7:
      bytes.append(1 + random.Below(64), static_cast<char>(random.Below(256)));
      break;
    case 8:
      bytes.insert(at, Tokens()[random.Below(Tokens().size())]);
      break;
    default: {
      // A number, or what follows, becomes a token.
      size_t digit = bytes.find_first_of("0123456789", at);
      if (digit == std::string::npos) digit = at;
      size_t end = bytes.find_first_not_of("0123456789.", digit);
      if (end == std::string::npos) end = bytes.size();
      bytes.replace(digit, end - digit,
                    Tokens()[random.Below(Tokens().size())]);
    }
  }
}

std::string HostileValue(Random& random) {
  static const std::vector<std::string> values = {
      "null",
      "true",
      "false",
      "0",
      "1",
      "2",
      "3",
      "7",
      "-1",
      "-0",
      "64",
      "65",
      "1.5",
      "1e308",
      "-1e308",
      "1e-320",
      "1e18",
      "4294967295",
      "2147483648",
      "1048576",
      "1048577",
      "16777216",
      "9223372036854775807",
      "-9223372036854775808",
      "9223372036854775808",
      "18446744073709551615",
      "\"\"",
      "\"qwen2\"",
      "\"llama\"",
      "\"llama3\"",
      "\"default\"",
      "\"\\u0000\\n\\u001b[2J\"",
      "[]",
      "{}",
      "[[]]",
      "[1]",
      "[\"full_attention\"]",
      "[\"sliding_attention\",\"sliding_attention\"]",
      "{\"rope_type\":\"llama3\"}",
      "{\"a\":{\"b\":[{}]}}"};
  uint64_t pick = random.Below(values.size() + 1);
  if (pick < values.size()) return values[pick];
  size_t depth = 1 + random.Below(2000);
  return std::string(depth, '[') + std::string(depth, ']');
}

// Writes `value` with hostile members in it, one in `rate` on average.
void Dump(const json& value, uint64_t rate, Random& random, std::string& out) {
  if (random.Below(rate) == 0) {
    out += HostileValue(random);
    return;
  }
  if (!value.is_structured()) {
    out += value.dump();
    return;
  }
  bool object = value.is_object();
  out += object ? "{" : "[";
  bool first = true;
  auto separate = [&] {
    if (!first) out += ",";
    first = false;
  };
  for (auto it = value.begin(); it != value.end(); ++it) {
    uint64_t change = random.Below(rate * 3);
    if (change == 0) continue;  // removed
    for (int copies = change == 1 ? 2 : 1; copies > 0; --copies) {
      separate();
      if (object) absl::StrAppend(&out, json(it.key()).dump(), ":");
      Dump(*it, rate, random, out);
    }
  }
  if (random.Below(rate) == 0) {
    static const char* const keys[] = {"head_dim",
                                       "sliding_window",
                                       "layer_types",
                                       "rope_scaling",
                                       "rope_theta",
                                       "num_experts",
                                       "attention_bias",
                                       "quantization_config",
                                       "use_sliding_window",
                                       "rope_parameters",
                                       "dtype",
                                       "num_key_value_heads"};
    separate();
    if (object) {
      absl::StrAppend(&out, "\"", keys[random.Below(std::size(keys))], "\":");
    }
    out += HostileValue(random);
  }
  out += object ? "}" : "]";
}

}  // namespace

std::string MutateBytes(std::string bytes, Random& random) {
  for (uint64_t edits = 1 + random.Below(4); edits > 0; --edits) {
    Edit(bytes, random);
  }
  return bytes;
}

std::string MutateJson(const json& value, Random& random) {
  std::string out;
  Dump(value, 12 + random.Below(40), random, out);
  return out;
}

::testing::AssertionResult IsClearRefusal(const absl::Status& status,
                                          absl::string_view file) {
  std::string message(status.message());
  auto bad = [&](absl::string_view why) {
    return ::testing::AssertionFailure()
           << std::string(why) << ": " << status.ToString();
  };
  if (status.code() != absl::StatusCode::kInvalidArgument) {
    return bad("not InvalidArgument");
  }
  if (!absl::StrContains(message, file)) return bad("does not name the file");
  if (message.size() <= file.size() + 5) return bad("says nothing");
  if (message.size() > 2000) return bad("too long");
  for (char c : message) {
    auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte >= 0x7f) return bad("not one line of plain text");
  }
  return ::testing::AssertionSuccess();
}

}  // namespace slidedp::testing
