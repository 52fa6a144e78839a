#include "hostd/store/pieces.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <thread>

#include "common/base/status.h"
#include "common/base/units.h"

namespace slidedp::hostd {

absl::StatusOr<std::vector<PlacedTensor>> PlaceTensors(
    const model::StateLayout& layout, const model::TensorSource& source) {
  std::vector<PlacedTensor> placed;
  for (size_t u = 0; u < layout.units.size(); ++u) {
    for (const model::Tensor& tensor : layout.units[u].tensors) {
      const model::TensorSource::Ref ref = source.Find(tensor.name);
      if (ref.entry == nullptr) {
        return absl::NotFoundError(
            absl::StrCat(tensor.name, ": in none of the model's files"));
      }
      if (ref.entry->count() != tensor.count) {
        return InvalidInput(ref.file->name, tensor.name,
                            absl::StrCat(ref.entry->count(), " elements"),
                            absl::StrCat("config.json asks for ", tensor.count),
                            "use the weights that belong to this config.json");
      }
      placed.push_back({static_cast<int>(u), &tensor, ref});
    }
  }
  return placed;
}

PlacedTensor TiedHead(const model::StateLayout& layout,
                      const model::TensorSource& source) {
  PlacedTensor head = {layout.embedding_unit(), nullptr, {nullptr, nullptr}};
  head.tensor = &layout.units[head.unit].tensor(model::Role::kEmbedding);
  if (layout.tied()) head.ref = source.Find("lm_head.weight");
  return head;
}

absl::Status ForEachPiece(const std::vector<PlacedTensor>& tensors, int threads,
                          const std::atomic<bool>* stop,
                          const PieceFunction& work) {
  // Number of each tensor's first piece.
  std::vector<uint64_t> first_piece;
  uint64_t pieces = 0;
  for (const PlacedTensor& placed : tensors) {
    first_piece.push_back(pieces);
    pieces += CeilDiv(placed.tensor->count, kPieceElements);
  }
  std::atomic<uint64_t> next = 0;
  std::atomic<uint64_t> failed_piece = pieces;  // the lowest so far
  std::mutex mutex;
  absl::Status failure;  // of failed_piece

  auto run = [&] {
    const auto scratch = std::make_unique<float[]>(kPieceElements);
    for (uint64_t piece = next++; piece < failed_piece; piece = next++) {
      const size_t index =
          std::upper_bound(first_piece.begin(), first_piece.end(), piece) -
          first_piece.begin() - 1;
      const uint64_t first = (piece - first_piece[index]) * kPieceElements;
      const uint64_t count =
          std::min(kPieceElements, tensors[index].tensor->count - first);
      const absl::Status status =
          stop != nullptr && *stop ? absl::CancelledError("told to stop")
                                   : work(index, first, count, scratch.get());
      if (status.ok()) continue;
      std::lock_guard lock(mutex);
      if (piece < failed_piece) {
        failed_piece = piece;
        failure = status;
      }
    }
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(run);
  run();
  for (std::thread& thread : others) thread.join();
  return failure;
}

}  // namespace slidedp::hostd
