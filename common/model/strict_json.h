// JSON from hostile input: valid UTF-8, bounded depth, no duplicate keys, no
// numbers beyond double. What nlohmann alone would accept or silently merge is
// an error here.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace slidedp::model {

// `text` as one line of ASCII of bounded length, for messages.
std::string Printable(absl::string_view text);
// A JSON value in the same form: `"abc"`, `{3 members}`, `[2 items]`.
std::string Describe(const nlohmann::json& value);
// "a string", "an object", ...
absl::string_view JsonTypeName(const nlohmann::json& value);

// Deeper nesting than `max_depth` is an error before anything is built.
absl::StatusOr<nlohmann::json> ParseStrictJson(absl::string_view text,
                                               absl::string_view file,
                                               int max_depth);

}  // namespace slidedp::model
