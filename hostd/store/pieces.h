// Tensors of a source cut into pieces that threads work through. Memory is
// bounded by threads x piece, whatever the model's size.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "common/model/layout.h"
#include "common/model/source.h"

namespace slidedp::hostd {

// A tensor of the planes and its place in the source's files.
struct PlacedTensor {
  int unit;
  const model::Tensor* tensor;
  model::TensorSource::Ref ref;
};

// Every tensor of the layout; NotFound names one that the source lacks, and
// InvalidArgument one of another size.
absl::StatusOr<std::vector<PlacedTensor>> PlaceTensors(
    const model::StateLayout& layout, const model::TensorSource& source);

// The file's own lm_head of a tied model, placed on the embedding; null entry
// if there is none.
PlacedTensor TiedHead(const model::StateLayout& layout,
                      const model::TensorSource& source);

// At most this many elements a piece.
inline constexpr uint64_t kPieceElements = uint64_t{1} << 16;
// More threads than this gain nothing against one disk.
inline constexpr int kMaxFileThreads = 8;

// Elements [first, first + count) of tensors[index]. `scratch` has room for
// count floats.
using PieceFunction = std::function<absl::Status(
    size_t index, uint64_t first, uint64_t count, float* scratch)>;

// Calls `work` on every piece, from `threads` (at least 1) at once. Returns the
// error of the first failing piece in tensor order, whatever the thread timing;
// pieces after it may be left out. Cancelled, at the next piece, if `stop`
// becomes true; null: never.
absl::Status ForEachPiece(const std::vector<PlacedTensor>& tensors, int threads,
                          const std::atomic<bool>* stop,
                          const PieceFunction& work);

}  // namespace slidedp::hostd
