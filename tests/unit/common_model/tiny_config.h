// A small config.json to change, and to read.
#pragma once

#include "absl/status/statusor.h"
#include "common/model/config.h"
#include "nlohmann/json.hpp"
#include "tests/testing/tiny_model.h"

namespace slidedp::model {

inline nlohmann::json TinyConfigOf(Family family = Family::kQwen3) {
  testing::TinyModelOptions options;
  options.family = family;
  return nlohmann::json::parse(testing::TinyConfigJson(options));
}

inline absl::StatusOr<ModelConfig> Parse(const nlohmann::json& config) {
  return ParseModelConfig(config.dump(), "dir/config.json");
}

}  // namespace slidedp::model
