// One line of a results file (tests/bench/README.md).
#pragma once

#include <string>

#include "absl/status/status.h"
#include "nlohmann/json.hpp"

namespace slidedp::bench {

using Json = nlohmann::ordered_json;

// What the binary can't know by itself.
struct Origin {
  std::string json_file;  // lines are appended; empty: none are written
  std::string commit;
  std::string machine;
  std::string command;
};

struct Result {
  std::string bench;  // "layer-qwen3-8b"
  double value = 0;
  std::string unit;    // "TFLOP/s", "ratio"
  std::string target;  // what issue or README asks for; empty: nothing
  Json detail = Json::object();
};

// {bench, value, unit, target, commit, date, machine, command, detail}.
Json JsonResult(const Result& result, const Origin& origin);
// Appends the line to the file, and prints it shortly.
absl::Status Report(const Result& result, const Origin& origin);

}  // namespace slidedp::bench
