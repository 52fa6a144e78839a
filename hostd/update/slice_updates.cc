#include "hostd/update/slice_updates.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/units.h"
#include "hostd/update/gradients.h"

namespace slidedp::hostd {
namespace {

// Updated and corrected while they lie in the caches.
constexpr uint64_t kTwiceElements = 4096;

}  // namespace

SliceUpdates::SliceUpdates(HostState& state, const StepWork& work)
    : state_(state),
      work_(work),
      keeps_sums_(state.plan().update_mode != policy::UpdateMode::kEager),
      drains_used_rows_(policy::DrainsUsedRows(state.layout(), state.plan())),
      early_pieces_(work.pieces.size()),
      updated_(work.slices),
      rows_updated_(work.slices),
      square_norms_(work.units.size()) {
  for (size_t u = 0; u < work.units.size(); ++u) {
    if (!work.units[u].host_sums) continue;
    SDP_CHECK(!keeps_sums_ || state.reduced(static_cast<int>(u), 0) != nullptr,
              "no plane for the sums of the ranks' gradients");
    square_norms_[u].resize(
        keeps_sums_ ? CeilDiv(state.layout().units[u].count, kNormBlockElements)
                    : work.units[u].slices);
  }
}

void SliceUpdates::BeginStep(uint64_t step, const AdamWStep& early) {
  step_ = step;
  early_ = early;
  c_.reset();
  used_rows_.clear();
  std::fill(early_pieces_.begin(), early_pieces_.end(), 0);
  std::fill(updated_.begin(), updated_.end(), 0);
  std::fill(rows_updated_.begin(), rows_updated_.end(), 0);
}

void SliceUpdates::SetUsedRows(std::vector<uint64_t> used) {
  used_rows_ = std::move(used);
}

uint64_t SliceUpdates::norm_blocks(int unit) const {
  return FromReduced(unit) ? square_norms_[unit].size() : 0;
}

double SliceUpdates::HostSquareNorm(int unit) const {
  double sum = 0;
  for (double part : square_norms_[unit]) sum += part;
  return sum;
}

SliceUpdates::Part SliceUpdates::GradientPart(const Piece& piece) const {
  // In this order: the rows may be set while other units are updated.
  if (piece.unit != state_.layout().embedding_unit()) return Part::kAll;
  if (rows_apart()) return Part::kUsedRows;
  SDP_CHECK(!drains_used_rows_,
            "the embedding is updated before its used rows "
            "are known");
  return Part::kAll;
}

std::vector<const bf16*> SliceUpdates::Chunks(const Piece& piece) const {
  std::vector<const bf16*> sources;
  for (const ChunkRef& chunk : piece.chunks) {
    sources.push_back(state_.grad_chunk(
        chunk.rank, step_ * work_.chunks(chunk.rank) + chunk.index));
  }
  return sources;
}

std::vector<const bf16*> SliceUpdates::Sources(const Piece& piece) const {
  if (!FromReduced(piece.unit)) return Chunks(piece);
  return {state_.reduced(piece.unit, piece.begin)};
}

bool SliceUpdates::ForEachRows(const model::Tensor& table, uint64_t begin,
                               uint64_t end, bool used, OnRange body) const {
  const uint64_t width = table.count / static_cast<uint64_t>(table.shape[0]);
  const auto is_used = [&](uint64_t row) {
    return static_cast<bool>((used_rows_[row / 64] >> (row % 64)) & 1);
  };
  uint64_t row = (begin - table.offset) / width;
  while (begin < end) {
    const bool found = is_used(row) == used;
    uint64_t stop = table.offset + ++row * width;
    while (stop < end && (is_used(row) == used) == found) stop += width, ++row;
    stop = std::min(stop, end);
    if (found && !body(table, begin, stop)) return false;
    begin = stop;
  }
  return true;
}

absl::Status SliceUpdates::ForEachRange(const Piece& piece, uint64_t slice,
                                        Part part, OnRange body) {
  const uint64_t slice_begin = piece.begin + slice * work_.slice_elements;
  const uint64_t slice_end =
      std::min(slice_begin + work_.slice_elements, piece.begin + piece.count);
  for (const model::Tensor& tensor :
       state_.layout().units[piece.unit].tensors) {
    const uint64_t begin = std::max(slice_begin, tensor.offset);
    const uint64_t end = std::min(slice_end, tensor.offset + tensor.count);
    if (begin >= end || tensor.frozen) continue;
    bool finite = true;
    if (part == Part::kAll || tensor.role != model::Role::kEmbedding) {
      if (part != Part::kOtherRows) finite = body(tensor, begin, end);
    } else {
      finite = ForEachRows(tensor, begin, end, part == Part::kUsedRows, body);
    }
    if (finite) continue;
    return absl::FailedPreconditionError(
        absl::StrCat(DescribeUnit(state_.layout(), piece.unit), ", step ",
                     step_, ": ", tensor.name,
                     ": the update left the finite range; lower the learning "
                     "rate or start from the last checkpoint"));
  }
  return absl::OkStatus();
}

void SliceUpdates::Sum(const Piece& piece, uint64_t slice) {
  const std::vector<const bf16*> sources = Chunks(piece);
  bf16* reduced = state_.reduced(piece.unit, piece.begin);
  const uint64_t begin = slice * work_.slice_elements;
  const uint64_t end = std::min(begin + work_.slice_elements, piece.count);
  float sum[kSumElements];
  for (uint64_t at = begin; at < end; at += kSumElements) {
    const uint64_t count = std::min(kSumElements, end - at);
    SumGradients(sources, at, count, sum);
    for (uint64_t i = 0; i < count; ++i) {
      reduced[at + i] = FloatToBf16Even(sum[i]);
    }
  }
}

void SliceUpdates::Norm(int unit, uint64_t block) {
  const uint64_t begin = block * kNormBlockElements;
  const uint64_t count =
      std::min(kNormBlockElements, state_.layout().units[unit].count - begin);
  square_norms_[unit][block] = SquareNorm(state_.reduced(unit, begin), count);
}

absl::Status SliceUpdates::Update(const Piece& piece, uint64_t slice,
                                  const AdamWStep& step) {
  const std::vector<const bf16*> sources = Sources(piece);
  if (sources.size() > 1) return UpdateFromSums(piece, slice, sources);
  return ForEachRange(
      piece, slice, GradientPart(piece),
      [&](const model::Tensor& tensor, uint64_t begin, uint64_t end) {
        return AdamWUpdate(state_.planes(piece.unit, begin, end - begin),
                           sources[0] + (begin - piece.begin), tensor.decay,
                           step);
      });
}

// Eager mode: the sum is used as it is made.
absl::Status SliceUpdates::UpdateFromSums(
    const Piece& piece, uint64_t slice, std::span<const bf16* const> sources) {
  double square_norm = 0;
  const absl::Status status = ForEachRange(
      piece, slice, GradientPart(piece),
      [&](const model::Tensor& tensor, uint64_t begin, uint64_t end) {
        float sum[kSumElements];
        for (uint64_t at = begin; at < end; at += kSumElements) {
          const uint64_t count = std::min(kSumElements, end - at);
          SumGradients(sources, at - piece.begin, count, sum);
          square_norm += SquareNorm(sum, count);
          if (!AdamWUpdate(state_.planes(piece.unit, at, count), sum,
                           tensor.decay, early_)) {
            return false;
          }
        }
        return true;
      });
  const uint64_t place =
      piece.first_slice + slice - work_.units[piece.unit].first_slice;
  square_norms_[piece.unit][place] = square_norm;
  return status;
}

absl::Status SliceUpdates::Early(const Piece& piece, uint64_t slice) {
  absl::Status status = Update(piece, slice, early_);
  updated_[piece.first_slice + slice] = true;
  return status;
}

absl::Status SliceUpdates::Final(const Piece& piece, uint64_t slice) {
  const bool is_early = early(work_.piece_index(piece));
  if (!is_early) {
    AdamWStep step = early_;
    step.grad_scale = *c_;
    return Update(piece, slice, step);
  }
  const bool updated = updated_[piece.first_slice + slice];
  const bf16* gradient = Sources(piece)[0];
  return ForEachRange(
      piece, slice, GradientPart(piece),
      [&](const model::Tensor& tensor, uint64_t begin, uint64_t end) {
        for (uint64_t at = begin; at < end; at += kTwiceElements) {
          const PlaneSpan planes =
              state_.planes(piece.unit, at, std::min(kTwiceElements, end - at));
          const bf16* g = gradient + (at - piece.begin);
          if (!updated && !AdamWUpdate(planes, g, tensor.decay, early_)) {
            return false;
          }
          const bool finite = c_.has_value()
                                  ? AdamWCorrect(planes, g, early_, *c_)
                                  : AdamWUndo(planes, g, tensor.decay, early_);
          if (!finite) return false;
        }
        return true;
      });
}

absl::Status SliceUpdates::Rows(const Piece& piece, uint64_t slice) {
  char& updated = rows_updated_[piece.first_slice + slice];
  if (updated) return absl::OkStatus();
  updated = true;
  return ForEachRange(
      piece, slice, Part::kOtherRows,
      [&](const model::Tensor& tensor, uint64_t begin, uint64_t end) {
        return AdamWUpdateZero(state_.planes(piece.unit, begin, end - begin),
                               tensor.decay, early_);
      });
}

absl::Status SliceUpdates::UndoRows(const Piece& piece, uint64_t slice) {
  if (absl::Status status = Rows(piece, slice); !status.ok()) return status;
  return ForEachRange(
      piece, slice, Part::kOtherRows,
      [&](const model::Tensor& tensor, uint64_t begin, uint64_t end) {
        return AdamWUndoZero(state_.planes(piece.unit, begin, end - begin),
                             tensor.decay, early_);
      });
}

}  // namespace slidedp::hostd
