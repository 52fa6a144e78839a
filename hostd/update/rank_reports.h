// What the ranks say, read as hostile: every value is copied once, then
// checked. Errors name the rank.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "common/shm/words.h"

namespace slidedp::hostd {

// Of what ranks report: neither NaN, infinite nor negative.
inline bool FiniteSquareNorm(double x) {
  return x >= 0 && x <= std::numeric_limits<double>::max();
}

// Maximum of the ranks, but begin_ns: the earliest.
struct StepTimes {
  int64_t begin_ns = 0;
  int64_t deliver_ns = 0, compute_ns = 0, reduce_ns = 0, drain_ns = 0,
          stall_ns = 0, offload_ns = 0, offload_wait_ns = 0;
  bool complete = false;  // every rank's times are in
};

class RankReports {
 public:
  // `rows`: policy::ReportedRows.
  RankReports(const shm::Reports& reports, int ranks, uint64_t rows)
      : reports_(reports), ranks_(ranks), rows_(rows) {}

  // Tokens that count in the step's loss; nothing until all ranks have begun
  // the step. An error if the ranks disagree.
  absl::StatusOr<std::optional<uint64_t>> ValidTokens(uint64_t step) const;
  // Rows of the table that any rank's batch uses, as shm::Reports::used_rows
  // has them, after ValidTokens() of the step. An error if a rank names a row
  // that isn't there. Empty without rows.
  absl::StatusOr<std::vector<uint64_t>> UsedRows(uint64_t step) const;
  // Whether all ranks have read the embedding unit in this step.
  absl::StatusOr<bool> Embedded(uint64_t step) const;
  // Loss sums of all ranks; nothing until all are there.
  absl::StatusOr<std::optional<std::vector<double>>> LossSums(
      uint64_t step) const;
  // Of the ranks whose times are there.
  StepTimes Times(uint64_t step) const;
  double SquareNorm(int rank, int bucket) const;
  // Pairs with the rank's release.
  uint64_t GradReady(int rank) const;

 private:
  // Whether the flag announces `step`; an error if it announces a later one.
  absl::StatusOr<bool> Announced(const shm::Word& flag, uint64_t step, int rank,
                                 const char* field) const;

  const shm::Reports reports_;
  const int ranks_;
  const uint64_t rows_;
};

}  // namespace slidedp::hostd
