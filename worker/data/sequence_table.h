// Of which tokens each sequence of a data set is made: a table, made once from
// the documents' lengths, so that any sequence is found in O(1).
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace slidedp::data {

// What becomes of a document that is longer than a sequence.
enum class LongDocuments {
  kSplit,     // parts of a sequence's length, and the rest: each a document
  kTruncate,  // what lies beyond is not trained on
};

struct SequenceOptions {
  // Several whole documents share a sequence, of either layout. Not packed, a
  // document has a sequence of its own, and a stream is cut evenly.
  bool packing = false;
  LongDocuments long_documents = LongDocuments::kSplit;
  // Packing: which documents of one length go where.
  uint64_t seed = 0;
};

// Consecutive tokens of the file: a document, a part of one or, in a stream
// that is not packed, a sequence.
struct Piece {
  uint64_t begin;
  uint32_t length;
};

class SequenceTable {
 public:
  // Empty until assigned.
  SequenceTable() = default;
  // `offsets`: 0 < ... < tokens, ascending. `length`: at most INT32_MAX.
  SequenceTable(absl::Span<const int64_t> offsets, bool stream, int64_t length,
                const SequenceOptions& options);

  uint64_t size() const { return begin_.empty() ? 0 : begin_.size() - 1; }
  // In the order in which they lie in the sequence; padding follows.
  absl::Span<const Piece> operator[](uint64_t sequence) const {
    return absl::MakeConstSpan(pieces_).subspan(
        begin_[sequence], begin_[sequence + 1] - begin_[sequence]);
  }
  uint64_t TokenCount(uint64_t sequence) const;

 private:
  void CutEvenly(uint64_t tokens, uint32_t length);
  void OneEach(std::vector<Piece> pieces);
  void Pack(std::vector<Piece> pieces, uint32_t length);

  std::vector<Piece> pieces_;
  std::vector<uint64_t> begin_;  // of each sequence in pieces_; then their end
};

// What SequenceTable takes at most while it is made, of each document.
inline constexpr uint64_t kTableBytesPerDocument = 80;

}  // namespace slidedp::data
