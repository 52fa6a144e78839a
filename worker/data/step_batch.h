// One rank's part of a step.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "worker/data/mixture.h"

namespace slidedp::data {

// Positions that `epochs` passes over the data take, rounded up (but not by a
// rounding error of the product): the job ends at this position, so its steps
// are these positions divided by batch_size, rounded up.
inline uint64_t EpochPositions(double epochs, uint64_t sequences) {
  const double exact = epochs * static_cast<double>(sequences);
  return static_cast<uint64_t>(std::ceil(exact - 1e-12 * std::max(1.0, exact)));
}

// `micro_batches` x `micro_batch_size` sequences. Rank r takes places
// [r * n, (r + 1) * n) of the step's padded batch; places at or beyond
// batch_size, and positions at or beyond `end_position` (epochs), are
// zero-weight: ids 0, labels -1.
struct StepBatch {
  std::vector<int32_t> ids;     // [micro_batches * micro_batch_size * sequence]
  std::vector<int32_t> labels;  // the same
  // Packed: ops::Documents of the micro-batches, one after another; offsets
  // hold micro_batch_size * documents_per_sequence + 1 each. Else empty.
  std::vector<int32_t> first_rows;
  std::vector<int32_t> offsets;
  uint64_t valid_tokens;  // of all ranks
};
struct BatchShape {
  int ranks = 1;
  int64_t batch_size = 0;
  int64_t micro_batch_size = 0;
  int64_t micro_batches = 0;  // per rank
  uint64_t end_position = UINT64_MAX;
  int64_t documents_per_sequence = 0;  // packed: room for so many, else 0
};
void FillStepBatch(const Mixture& data, const BatchShape& shape, int rank,
                   uint64_t step, StepBatch& batch);
// One rank's part of a round of an evaluation: of sequences [0, sequences) in
// their order, as many as a step takes, cut as a step is. What is missing in
// the last round is zero-weight. valid_tokens: of this rank only. `dataset` is
// packed as the job's data are.
void FillEvalBatch(const Dataset& dataset, uint64_t sequences,
                   const BatchShape& shape, int rank, uint64_t round,
                   StepBatch& batch);

}  // namespace slidedp::data
