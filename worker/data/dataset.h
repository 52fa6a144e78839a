// A token dataset made by slidedp-prepare, and the order in which a job reads
// it.
//
// File: safetensors with `input_ids` int32 [N], `loss_mask` uint8 [N] (1: the
// token is a label), `doc_offsets` int64 [D + 1] (0 = first, N = last,
// strictly ascending), and no other tensor. Metadata: "format" =
// "slidedp-dataset", "version" = "1", "layout" = "stream" (documents joined,
// cut into sequences of equal length, the tail dropped) or "documents" (one
// document a sequence, cut at sequence_length, padded by length). Other
// metadata ("tokenizer_sha256" ...) is for people and tools; it is not read
// here.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/fd.h"

namespace slidedp::data {

class Dataset {
 public:
  // Reads and checks everything (hostile): token ids in [0, vocab), offsets,
  // shapes, at least one label. Errors name the position and value.
  static absl::StatusOr<Dataset> Open(const std::string& path,
                                      int64_t sequence_length, int64_t vocab);

  uint64_t sequences() const { return sequences_; }
  uint64_t tokens() const { return input_ids_.size(); }
  // Labels over all sequences, as Fill would give them.
  uint64_t valid_tokens() const { return valid_tokens_; }
  // Labels of one sequence.
  uint64_t LabelCount(uint64_t sequence) const;
  int64_t sequence_length() const { return sequence_length_; }

  // ids[sequence_length]: tokens, then 0. labels[sequence_length]: label of
  // position t is token t + 1 where its mask is 1, else -1 (already shifted;
  // the last position has none).
  void Fill(uint64_t sequence, int32_t* ids, int32_t* labels) const;

 private:
  Dataset() = default;
  // Tokens [first, second) of the file.
  std::pair<uint64_t, uint64_t> Extent(uint64_t sequence) const;

  std::vector<int32_t> input_ids_;
  std::vector<uint8_t> loss_mask_;
  std::vector<int64_t> doc_offsets_;
  bool stream_ = true;
  int64_t sequence_length_ = 0;
  uint64_t sequences_ = 0;
  uint64_t valid_tokens_ = 0;
};

// Which sequence comes when. Counter based: position p (0, 1, 2, ... over all
// steps) is sequence Permute(epoch = p / sequences, p % sequences), a keyed
// Feistel permutation with cycle walking, so any position costs O(1) and
// resuming needs the step number only. Step t of a job takes positions
// [t * batch_size, (t + 1) * batch_size).
class Sampler {
 public:
  Sampler(uint64_t sequences, uint64_t seed);
  uint64_t At(uint64_t position) const;

 private:
  uint64_t sequences_, seed_;
  int half_bits_;
};

// Positions that `epochs` passes over the data take, rounded up (but not by a
// rounding error of the product): the job ends at this position, so its steps
// are these positions divided by batch_size, rounded up.
inline uint64_t EpochPositions(double epochs, uint64_t sequences) {
  const double exact = epochs * static_cast<double>(sequences);
  return static_cast<uint64_t>(std::ceil(exact - 1e-12 * std::max(1.0, exact)));
}

// One rank's part of a step: `micro_batches` x `micro_batch_size` sequences.
// Rank r takes places [r * n, (r + 1) * n) of the step's padded batch; places
// at or beyond batch_size, and positions at or beyond `end_position` (epochs),
// are zero-weight: ids 0, labels -1.
struct StepBatch {
  std::vector<int32_t> ids;     // [micro_batches * micro_batch_size * sequence]
  std::vector<int32_t> labels;  // the same
  uint64_t valid_tokens;        // of all ranks
};
struct BatchShape {
  int ranks = 1;
  int64_t batch_size = 0;
  int64_t micro_batch_size = 0;
  int64_t micro_batches = 0;  // per rank
  uint64_t end_position = UINT64_MAX;
};
void FillStepBatch(const Dataset& dataset, const Sampler& sampler,
                   const BatchShape& shape, int rank, uint64_t step,
                   StepBatch& batch);
// One rank's part of a round of an evaluation: of sequences [0, sequences) in
// their order, as many as a step takes, cut as a step is. What is missing in
// the last round is zero-weight. valid_tokens: of this rank only.
void FillEvalBatch(const Dataset& dataset, uint64_t sequences,
                   const BatchShape& shape, int rank, uint64_t round,
                   StepBatch& batch);

}  // namespace slidedp::data
