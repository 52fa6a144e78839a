// Rotary position embedding settings of a config.json: transformers 4 writes
// rope_theta and rope_scaling, transformers 5 writes rope_parameters.
#pragma once

#include "absl/status/statusor.h"
#include "common/model/config.h"
#include "common/model/config_fields.h"

namespace slidedp::model {

// `fields` are those of the whole config.json.
absl::StatusOr<RopeConfig> ParseRope(const ConfigFields& fields, Family family);

}  // namespace slidedp::model
