#include "worker/data/dataset.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/crc32c.h"
#include "common/base/status.h"
#include "worker/data/dataset_file.h"

namespace slidedp::data {
namespace {

uint32_t ChecksumOf(const DatasetFile& file) {
  uint32_t crc = Crc32c(0, &file.stream, sizeof(file.stream));
  const auto add = [&](const auto& values) {
    crc = Crc32c(crc, values.data(), values.size() * sizeof(values[0]));
  };
  add(file.input_ids);
  add(file.loss_mask);
  add(file.doc_offsets);
  return crc;
}

}  // namespace

absl::StatusOr<Dataset> Dataset::Open(const std::string& path,
                                      int64_t sequence_length, int64_t vocab,
                                      const SequenceOptions& options) {
  // A sequence of one token has no label; beyond int32 no op counts.
  if (sequence_length < 2 || sequence_length > INT32_MAX) {
    return InvalidInput("", "sequence_length", absl::StrCat(sequence_length),
                        absl::StrCat("must lie in [2, ", INT32_MAX, "]"), "");
  }
  SDP_ASSIGN_OR_RETURN(DatasetFile file, ReadDatasetFile(path, vocab));
  Dataset dataset;
  dataset.path_ = path;
  dataset.crc32c_ = ChecksumOf(file);
  dataset.input_ids_ = std::move(file.input_ids);
  dataset.loss_mask_ = std::move(file.loss_mask);
  dataset.sequence_length_ = sequence_length;
  dataset.table_ =
      SequenceTable(file.doc_offsets, file.stream, sequence_length, options);
  if (dataset.sequences() == 0) {
    return InvalidInput(
        path, "input_ids", absl::StrCat(dataset.tokens(), " tokens"),
        absl::StrCat("fewer than one sequence of ", sequence_length),
        "lower sequence_length or add data");
  }
  for (uint64_t i = 0; i < dataset.sequences(); ++i) {
    const auto pieces = static_cast<int64_t>(dataset.table_[i].size());
    const auto tokens = static_cast<int64_t>(dataset.TokenCount(i));
    dataset.used_tokens_ += tokens;
    if (options.packing) {
      dataset.documents_per_sequence_ =
          std::max(dataset.documents_per_sequence_,
                   pieces + (tokens < sequence_length ? 1 : 0));
    }
    dataset.labels_.push_back(static_cast<uint32_t>(dataset.CountLabels(i)));
    dataset.valid_tokens_ += dataset.labels_.back();
  }
  if (dataset.valid_tokens_ == 0) {
    return InvalidInput(
        path, "loss_mask", "",
        absl::StrCat("no label in any of ", dataset.sequences(),
                     " sequences of ", sequence_length, " tokens"),
        "raise sequence_length if answers are cut off, or mark the tokens to "
        "learn with slidedp-prepare");
  }
  return dataset;
}

uint64_t Dataset::CountLabels(uint64_t sequence) const {
  uint64_t labels = 0;
  for (const Piece& piece : table_[sequence]) {
    const auto begin = loss_mask_.begin() + static_cast<int64_t>(piece.begin);
    // The first token is nobody's label.
    labels += std::count(begin + 1, begin + piece.length, uint8_t{1});
  }
  return labels;
}

void Dataset::Fill(uint64_t sequence, int32_t* ids, int32_t* labels) const {
  SDP_CHECK(sequence < sequences(), "no such sequence");
  std::fill(labels, labels + sequence_length_, -1);
  int32_t* const end = ids + sequence_length_;
  for (const Piece& piece : table_[sequence]) {
    const int32_t* tokens = input_ids_.data() + piece.begin;
    const uint8_t* mask = loss_mask_.data() + piece.begin;
    std::copy(tokens, tokens + piece.length, ids);
    for (uint32_t t = 0; t + 1 < piece.length; ++t) {
      if (mask[t + 1] == 1) labels[t] = tokens[t + 1];
    }
    ids += piece.length;
    labels += piece.length;
  }
  std::fill(ids, end, 0);
}

void Dataset::AppendDocuments(uint64_t sequence, int32_t first_row,
                              std::vector<int32_t>& offsets) const {
  const int32_t end = first_row + static_cast<int32_t>(sequence_length_);
  for (const Piece& piece : table_[sequence]) {
    offsets.push_back(first_row);
    first_row += static_cast<int32_t>(piece.length);
  }
  if (first_row < end) offsets.push_back(first_row);
}

}  // namespace slidedp::data
