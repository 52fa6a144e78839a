#include <algorithm>
#include <atomic>
#include <memory>

#include "absl/strings/str_cat.h"
#include "common/base/fd.h"
#include "common/base/status.h"
#include "hostd/store/half.h"
#include "hostd/store/host_state.h"
#include "hostd/store/pieces.h"
#include "hostd/store/split.h"

namespace slidedp::hostd {
namespace {

// Adds the number of saturated elements to `saturated`.
absl::Status WritePiece(const PlacedTensor& placed, uint64_t first,
                        uint64_t count, float* scratch, const HostState& state,
                        int file, std::atomic<uint64_t>& saturated) {
  const PlaneSpan planes =
      state.planes(placed.unit, placed.tensor->offset + first, count);
  const model::TensorEntry& entry = *placed.ref.entry;
  const uint64_t element_bytes = model::DTypeBytes(entry.dtype);
  const void* data = scratch;
  std::vector<uint16_t> halves;
  switch (entry.dtype) {
    case model::DType::kBf16:
      data = planes.hi;
      break;
    case model::DType::kF32:
      for (uint64_t i = 0; i < count; ++i) {
        scratch[i] = JoinFloat(planes.hi[i], planes.lo[i]);
      }
      break;
    case model::DType::kF16: {
      halves.resize(count);
      uint64_t clipped = 0;
      for (uint64_t i = 0; i < count; ++i) {
        bool over = false;
        halves[i] =
            FloatToHalfSaturated(JoinFloat(planes.hi[i], planes.lo[i]), over);
        clipped += over;
      }
      if (clipped > 0) saturated += clipped;
      data = halves.data();
      break;
    }
    default:
      return absl::InternalError(
          absl::StrCat(placed.ref.file->name, ": ", entry.name, ": dtype ",
                       model::DTypeName(entry.dtype),
                       " passed validation but can't be written"));
  }
  return PwriteFully(file, data, count * element_bytes,
                     entry.begin + first * element_bytes,
                     placed.ref.file->name);
}

}  // namespace

absl::StatusOr<std::vector<std::string>> WriteParameters(
    const model::TensorSource& source, const HostState& state,
    const std::vector<int>& files, const std::atomic<bool>* stop) {
  if (files.size() != source.files().size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the model has ", source.files().size(), " files, but ",
                     files.size(), " were given to write"));
  }
  SDP_ASSIGN_OR_RETURN(std::vector<PlacedTensor> tensors,
                       PlaceTensors(state.layout(), source));
  const PlacedTensor head = TiedHead(state.layout(), source);
  if (head.ref.entry != nullptr) {
    if (head.ref.entry->count() != head.tensor->count) {
      return InvalidInput(
          head.ref.file->name, head.ref.entry->name,
          absl::StrCat(head.ref.entry->count(), " elements"),
          absl::StrCat("the tied head has ", head.tensor->count),
          "write over the files that were loaded");
    }
    tensors.push_back(head);
  }
  const auto saturated =
      std::make_unique<std::atomic<uint64_t>[]>(tensors.size());
  SDP_RETURN_IF_ERROR(ForEachPiece(
      tensors, std::min(state.plan().update_threads, kMaxFileThreads), stop,
      [&](size_t index, uint64_t first, uint64_t count, float* scratch) {
        const PlacedTensor& placed = tensors[index];
        return WritePiece(placed, first, count, scratch, state,
                          files[placed.ref.file - source.files().data()],
                          saturated[index]);
      }));
  std::vector<std::string> warnings;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (saturated[i] == 0) continue;
    warnings.push_back(absl::StrCat(
        tensors[i].ref.file->name, ": ", tensors[i].ref.entry->name, ": ",
        saturated[i].load(),
        " values beyond the largest F16 number were written as +-65504; start "
        "from a BF16 or F32 model to keep them"));
  }
  return warnings;
}

}  // namespace slidedp::hostd
