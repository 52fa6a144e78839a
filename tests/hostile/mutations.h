// Deterministic damage to inputs, and what a parser owes its caller on any of
// it: a usable value, or one short line that names the file.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/testing/random.h"

namespace slidedp::testing {

// One to four edits: flipped bits, overwritten, inserted, deleted, repeated and
// moved pieces, cut ends, JSON tokens and extreme numbers in odd places, bytes
// that are not UTF-8.
std::string MutateBytes(std::string bytes, Random& random);

// Replaces, removes, adds or duplicates members anywhere in a JSON text;
// syntax stays intact, except that keys may come twice and nesting may be deep.
std::string MutateJson(const nlohmann::json& value, Random& random);

// `status` is an error of the form every parser promises.
::testing::AssertionResult IsClearRefusal(const absl::Status& status,
                                          absl::string_view file);

// Of many damaged inputs.
struct Tally {
  int refused = 0, accepted = 0;
};

}  // namespace slidedp::testing
