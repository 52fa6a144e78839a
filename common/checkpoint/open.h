// A checkpoint on disk, opened to be read piece by piece: by slidedpctl, as the
// user. Sizes and headers are checked, checksums are not.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/bf16.h"
#include "common/base/fd.h"
#include "common/checkpoint/files.h"
#include "common/checkpoint/manifest.h"
#include "common/model/config.h"
#include "common/model/layout.h"
#include "common/model/source.h"

namespace slidedp::checkpoint {

class OpenCheckpoint {
 public:
  static absl::StatusOr<OpenCheckpoint> Open(const std::string& path);

  const Manifest& manifest() const { return manifest_; }
  const model::StateLayout& layout() const { return layout_; }
  // Its model files.
  const model::TensorSource& weights() const { return weights_; }

  // Elements [first, first + count) of a tensor of the unit.
  absl::Status ReadHi(const model::Tensor& tensor, uint64_t first,
                      uint64_t count, bf16* out) const;
  absl::Status ReadState(Plane plane, int unit, const model::Tensor& tensor,
                         uint64_t first, uint64_t count, void* out) const;

 private:
  OpenCheckpoint(Manifest manifest, model::StateLayout layout,
                 model::TensorSource weights)
      : manifest_(std::move(manifest)),
        layout_(std::move(layout)),
        weights_(std::move(weights)) {}

  Manifest manifest_;
  model::StateLayout layout_;
  model::TensorSource weights_;
  std::vector<File> state_files_;  // per unit
  std::vector<UniqueFd> states_;
};

}  // namespace slidedp::checkpoint
