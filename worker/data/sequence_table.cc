#include "worker/data/sequence_table.h"

#include <algorithm>
#include <map>
#include <utility>

#include "common/base/check.h"
#include "worker/data/sampler.h"

namespace slidedp::data {
namespace {

// The parts of all documents, documents in the order of a permutation.
std::vector<Piece> Parts(absl::Span<const int64_t> offsets, uint32_t length,
                         const SequenceOptions& options) {
  const uint64_t documents = offsets.size() - 1;
  const Sampler order(documents, options.seed);
  std::vector<Piece> parts;
  parts.reserve(documents);
  for (uint64_t i = 0; i < documents; ++i) {
    const uint64_t document = options.packing ? order.At(i) : i;
    const uint64_t end = offsets[document + 1];
    for (uint64_t at = offsets[document]; at < end; at += length) {
      const uint64_t left = end - at;
      parts.push_back(
          {at, static_cast<uint32_t>(std::min<uint64_t>(left, length))});
      if (options.long_documents == LongDocuments::kTruncate) break;
    }
  }
  return parts;
}

}  // namespace

SequenceTable::SequenceTable(absl::Span<const int64_t> offsets, bool stream,
                             int64_t length, const SequenceOptions& options) {
  SDP_CHECK(offsets.size() >= 2 && length >= 1 && length <= INT32_MAX,
            "a sequence table of nothing");
  const auto n = static_cast<uint32_t>(length);
  if (options.packing) {
    Pack(Parts(offsets, n, options), n);
  } else if (stream) {
    CutEvenly(offsets.back(), n);
  } else {
    OneEach(Parts(offsets, n, options));
  }
}

void SequenceTable::CutEvenly(uint64_t tokens, uint32_t length) {
  for (uint64_t at = 0; at + length <= tokens; at += length) {
    pieces_.push_back({at, length});
  }
  OneEach(std::move(pieces_));
}

void SequenceTable::OneEach(std::vector<Piece> pieces) {
  pieces_ = std::move(pieces);
  begin_.resize(pieces_.size() + 1);
  for (uint64_t i = 0; i < begin_.size(); ++i) begin_[i] = i;
}

// Best fit, longest first: each goes where the least room is left that holds
// it. Ties of length stay in the order of `pieces`.
void SequenceTable::Pack(std::vector<Piece> pieces, uint32_t length) {
  std::stable_sort(
      pieces.begin(), pieces.end(),
      [](const Piece& a, const Piece& b) { return a.length > b.length; });
  std::vector<uint64_t> sequence_of(pieces.size());
  // Sequences by the room that is left in them; full ones are not there.
  std::map<uint32_t, std::vector<uint64_t>> open;
  std::vector<uint64_t> count;
  for (uint64_t i = 0; i < pieces.size(); ++i) {
    const auto fit = open.lower_bound(pieces[i].length);
    uint64_t sequence = count.size();
    uint32_t room = length;
    if (fit == open.end()) {
      count.push_back(0);
    } else {
      room = fit->first;
      sequence = fit->second.back();
      fit->second.pop_back();
      if (fit->second.empty()) open.erase(fit);
    }
    room -= pieces[i].length;
    if (room > 0) open[room].push_back(sequence);
    sequence_of[i] = sequence;
    ++count[sequence];
  }
  begin_.assign(count.size() + 1, 0);
  for (uint64_t s = 0; s < count.size(); ++s) {
    begin_[s + 1] = begin_[s] + count[s];
  }
  pieces_.resize(pieces.size());
  std::vector<uint64_t>& next = count;
  std::copy(begin_.begin(), begin_.end() - 1, next.begin());
  for (uint64_t i = 0; i < pieces.size(); ++i) {
    pieces_[next[sequence_of[i]]++] = pieces[i];
  }
}

uint64_t SequenceTable::TokenCount(uint64_t sequence) const {
  uint64_t tokens = 0;
  for (const Piece& piece : (*this)[sequence]) tokens += piece.length;
  return tokens;
}

}  // namespace slidedp::data
