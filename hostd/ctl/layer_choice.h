// What a layer keeps and offloads, as users write it.
#pragma once

#include <cstdint>
#include <optional>

#include "hostd/ctl/json_form.h"
#include "hostd/ctl/scalar.h"

namespace slidedp::ctl {

// none, selective, full, a segment's name or a list of those, as a mask of
// policy::Segment.
std::optional<Problem> ReadKeepMask(const YamlNode& node, uint8_t& mask);
// 0 to 1, to the next thousandth.
std::optional<Problem> ReadOffload(const YamlNode& node, uint16_t& permille);

// As ReadKeepMask reads it.
Json JsonKeep(uint8_t mask);

}  // namespace slidedp::ctl
