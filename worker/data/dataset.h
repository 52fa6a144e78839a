// A token dataset made by slidedp-prepare, as sequences of equal length.
//
// File: safetensors with `input_ids` int32 [N], `loss_mask` uint8 [N] (1: the
// token is a label), `doc_offsets` int64 [D + 1] (0 = first, N = last,
// strictly ascending), and no other tensor. Metadata: "format" =
// "slidedp-dataset", "version" = "1", "layout" = "stream" or "documents": what
// a job makes of it without packing. A stream's documents are joined and cut
// into sequences of equal length, the tail dropped; "documents" are one a
// sequence, padded by length. Other metadata ("tokenizer_sha256" ...) is for
// people and tools; it is not read here.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/data/sequence_table.h"

namespace slidedp::data {

class Dataset {
 public:
  // Reads and checks everything (hostile): token ids in [0, vocab), offsets,
  // shapes, at least one label. Errors name the position and value.
  static absl::StatusOr<Dataset> Open(const std::string& path,
                                      int64_t sequence_length, int64_t vocab,
                                      const SequenceOptions& options = {});

  const std::string& path() const { return path_; }
  // Of all that a job reads: the layout, input_ids, loss_mask, doc_offsets.
  uint32_t crc32c() const { return crc32c_; }
  uint64_t sequences() const { return table_.size(); }
  // Of the file.
  uint64_t tokens() const { return input_ids_.size(); }
  // Tokens and labels over all sequences, as Fill would give them: without what
  // is cut off.
  uint64_t used_tokens() const { return used_tokens_; }
  uint64_t valid_tokens() const { return valid_tokens_; }
  // Of one sequence.
  uint64_t TokenCount(uint64_t sequence) const {
    return table_.TokenCount(sequence);
  }
  uint64_t LabelCount(uint64_t sequence) const { return labels_[sequence]; }
  int64_t sequence_length() const { return sequence_length_; }
  // Packed: documents of the fullest sequence, its padding counted as one.
  // Else 0.
  int64_t documents_per_sequence() const { return documents_per_sequence_; }

  // ids[sequence_length]: tokens, then 0. labels[sequence_length]: label of
  // position t is token t + 1 where its mask is 1 and both are of one piece,
  // else -1 (already shifted; the last position has none).
  void Fill(uint64_t sequence, int32_t* ids, int32_t* labels) const;
  // Packed: adds first_row plus the begin of each document of the sequence to
  // `offsets`; the padding is one more document.
  void AppendDocuments(uint64_t sequence, int32_t first_row,
                       std::vector<int32_t>& offsets) const;

 private:
  Dataset() = default;
  uint64_t CountLabels(uint64_t sequence) const;

  std::string path_;
  uint32_t crc32c_ = 0;
  std::vector<int32_t> input_ids_;
  std::vector<uint8_t> loss_mask_;
  SequenceTable table_;
  std::vector<uint32_t> labels_;  // of each sequence
  int64_t sequence_length_ = 0;
  int64_t documents_per_sequence_ = 0;
  uint64_t used_tokens_ = 0;
  uint64_t valid_tokens_ = 0;
};

}  // namespace slidedp::data
