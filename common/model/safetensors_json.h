// The JSON part of a safetensors header: syntax only. Whether offsets, shapes
// and the file fit together is checked by ReadSafetensorsHeader.
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "common/model/safetensors.h"

namespace slidedp::model {

std::optional<DType> DTypeFromName(absl::string_view name);

// Fills in `header.tensors`, in the order of the text and with offsets relative
// to the data, and `header.metadata`. Streams: memory is bounded by a small
// multiple of the text, whatever it says.
absl::Status ParseSafetensorsJson(absl::string_view text,
                                  absl::string_view file,
                                  SafetensorsHeader& header);

}  // namespace slidedp::model
