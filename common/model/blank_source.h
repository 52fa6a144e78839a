// What a model trained from nothing has for a source: the headers of files that
// could hold it.
#pragma once

#include "absl/status/statusor.h"
#include "common/model/layout.h"
#include "common/model/source.h"

namespace slidedp::model {

// One model.safetensors in memory, BF16, with every tensor of the layout; its
// data is a hole of zeros that takes no memory.
absl::StatusOr<TensorSource> BlankSource(const StateLayout& layout);

}  // namespace slidedp::model
