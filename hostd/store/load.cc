#include <algorithm>
#include <bit>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "hostd/store/host_state.h"
#include "hostd/store/pieces.h"
#include "hostd/store/split.h"

namespace slidedp::hostd {
namespace {

absl::Status Refused(const PlacedTensor& placed, uint64_t element,
                     float value) {
  const bool finite =
      (std::bit_cast<uint32_t>(value) & 0x7fffffffu) < 0x7f800000u;
  return InvalidInput(
      placed.ref.file->name,
      absl::StrCat(placed.tensor->name, "[", element, "]"), absl::StrCat(value),
      finite ? "rounds to infinity in bfloat16" : "not a finite number",
      "use a model whose weights are finite and below 3.39e38");
}

absl::Status LoadPiece(const PlacedTensor& placed, uint64_t first,
                       uint64_t count, float* values, const HostState& state) {
  SDP_RETURN_IF_ERROR(model::ReadAsFloat(placed.ref, first, count, values));
  const PlaneSpan planes =
      state.planes(placed.unit, placed.tensor->offset + first, count);
  bool all_splittable = true;
  for (uint64_t i = 0; i < count; ++i) all_splittable &= Splittable(values[i]);
  if (!all_splittable) {
    uint64_t i = 0;
    while (Splittable(values[i])) ++i;
    return Refused(placed, first + i, values[i]);
  }
  for (uint64_t i = 0; i < count; ++i) {
    SplitFloat(values[i], planes.hi[i], planes.lo[i]);
  }
  return absl::OkStatus();
}

// An lm_head in a tied model's files is not loaded; training would ignore it.
absl::Status CompareTiedHead(const PlacedTensor& head, uint64_t first,
                             uint64_t count, float* values,
                             const HostState& state) {
  SDP_RETURN_IF_ERROR(model::ReadAsFloat(head.ref, first, count, values));
  const PlaneSpan planes =
      state.planes(head.unit, head.tensor->offset + first, count);
  for (uint64_t i = 0; i < count; ++i) {
    const float embedding = JoinFloat(planes.hi[i], planes.lo[i]);
    if (std::bit_cast<uint32_t>(embedding) ==
        std::bit_cast<uint32_t>(values[i])) {
      continue;
    }
    return InvalidInput(
        head.ref.file->name,
        absl::StrCat(head.ref.entry->name, "[", first + i, "]"),
        absl::StrCat(values[i]),
        absl::StrCat("config.json ties the head to ", head.tensor->name,
                     ", which holds ", embedding, " there"),
        absl::StrCat("set tie_word_embeddings to false in config.json to "
                     "train both, or take ",
                     head.ref.entry->name, " out of the file"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status LoadParameters(const model::TensorSource& source, HostState& state,
                            const std::atomic<bool>* stop,
                            LoadProgress* progress) {
  SDP_ASSIGN_OR_RETURN(const std::vector<PlacedTensor> tensors,
                       PlaceTensors(state.layout(), source));
  const auto bytes_of = [&](size_t index, uint64_t count) {
    return count * model::DTypeBytes(tensors[index].ref.entry->dtype);
  };
  if (progress != nullptr) {
    uint64_t all_bytes = 0;
    for (size_t i = 0; i < tensors.size(); ++i) {
      all_bytes += bytes_of(i, tensors[i].tensor->count);
    }
    progress->all_bytes = all_bytes;
  }
  const int threads = std::min(state.plan().update_threads, kMaxFileThreads);
  SDP_RETURN_IF_ERROR(ForEachPiece(
      tensors, threads, stop,
      [&](size_t index, uint64_t first, uint64_t count, float* scratch) {
        SDP_RETURN_IF_ERROR(
            LoadPiece(tensors[index], first, count, scratch, state));
        if (progress != nullptr) {
          progress->done_bytes += bytes_of(index, count);
        }
        return absl::OkStatus();
      }));
  const PlacedTensor head = TiedHead(state.layout(), source);
  if (head.ref.entry == nullptr) return absl::OkStatus();
  if (head.ref.entry->count() != head.tensor->count) {
    return InvalidInput(
        head.ref.file->name, head.ref.entry->name,
        absl::StrCat(head.ref.entry->count(), " elements"),
        absl::StrCat("config.json ties the head to ", head.tensor->name,
                     ", which has ", head.tensor->count),
        absl::StrCat(
            "set tie_word_embeddings to false in config.json, or take ",
            head.ref.entry->name, " out of the file"));
  }
  return ForEachPiece(
      {head}, threads, stop,
      [&](size_t, uint64_t first, uint64_t count, float* scratch) {
        return CompareTiedHead(head, first, count, scratch, state);
      });
}

}  // namespace slidedp::hostd
