// What a thread does to one slice of a piece. Knows nothing of the order of
// work and of words.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "hostd/store/host_state.h"
#include "hostd/update/adamw.h"
#include "hostd/update/step_work.h"

namespace slidedp::hostd {

class SliceUpdates {
 public:
  // Both are borrowed.
  SliceUpdates(HostState& state, const StepWork& work);

  // The coordinator's, while no slice runs that reads what they write.

  // `early`: the step's constants with c = 1.
  void BeginStep(uint64_t step, const AdamWStep& early);
  // The gradients of the table's other rows are zero (shm::Reports::used_rows,
  // of all ranks together), and may not lie in the chunks: only Rows() updates
  // those. With rows, comes before any update of the unit in the step.
  void SetUsedRows(std::vector<uint64_t> used);
  bool rows_apart() const { return !used_rows_.empty(); }
  // The piece is or will be updated by Early().
  void MarkEarly(int piece) { early_pieces_[piece] = true; }
  bool early(int piece) const { return early_pieces_[piece]; }
  // What Final() does. Nothing: the step is skipped.
  void Decide(std::optional<float> clip_coefficient) { c_ = clip_coefficient; }

  // The workers', each slice by one thread at a time.

  void Sum(const Piece& piece, uint64_t slice);
  void Norm(int unit, uint64_t block);
  absl::Status Early(const Piece& piece, uint64_t slice);
  // A piece that isn't early is updated. An early one is corrected or, if the
  // step is skipped, undone; if Early() did not get to the slice it is updated
  // first, so that bits don't depend on how far the workers were.
  absl::Status Final(const Piece& piece, uint64_t slice);
  // Rows of the table that no batch uses, unless that was done in this step.
  absl::Status Rows(const Piece& piece, uint64_t slice);
  absl::Status UndoRows(const Piece& piece, uint64_t slice);

  // Blocks that Norm() takes; of host-summed units, but in eager mode.
  uint64_t norm_blocks(int unit) const;
  // Sum of squares of a host-summed unit: eager mode: after its updates;
  // otherwise after Norm() of all blocks. Fixed order of additions.
  double HostSquareNorm(int unit) const;
  // The piece's gradient is read from `reduced`, its chunks by Sum() only.
  bool FromReduced(int unit) const {
    return keeps_sums_ && work_.units[unit].host_sums;
  }

 private:
  enum class Part { kAll, kUsedRows, kOtherRows };
  using OnRange = absl::FunctionRef<bool(const model::Tensor& tensor,
                                         uint64_t begin, uint64_t end)>;
  // Elements [begin, end) of the slice that are of the part and of one tensor,
  // ascending. An error if the body returns false: the update of that range
  // left the finite range.
  absl::Status ForEachRange(const Piece& piece, uint64_t slice, Part part,
                            OnRange body);
  bool ForEachRows(const model::Tensor& table, uint64_t begin, uint64_t end,
                   bool used, OnRange body) const;
  Part GradientPart(const Piece& piece) const;
  // Where the values of the piece's elements lie.
  std::vector<const bf16*> Sources(const Piece& piece) const;
  std::vector<const bf16*> Chunks(const Piece& piece) const;
  absl::Status Update(const Piece& piece, uint64_t slice,
                      const AdamWStep& step);
  absl::Status UpdateFromSums(const Piece& piece, uint64_t slice,
                              std::span<const bf16* const> sources);

  HostState& state_;
  const StepWork& work_;
  const bool keeps_sums_;        // not eager
  const bool drains_used_rows_;  // of the embedding nothing else is in `grads`

  uint64_t step_ = 0;
  AdamWStep early_ = {};
  std::optional<float> c_;
  std::vector<uint64_t> used_rows_;
  std::vector<char> early_pieces_;
  // Per slice, written by the thread that has it.
  std::vector<char> updated_, rows_updated_;
  // Per host-summed unit: of each block or, in eager mode, slice.
  std::vector<std::vector<double>> square_norms_;
};

}  // namespace slidedp::hostd
