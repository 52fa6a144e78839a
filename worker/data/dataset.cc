#include "worker/data/dataset.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status.h"
#include "worker/data/dataset_file.h"

namespace slidedp::data {

absl::StatusOr<Dataset> Dataset::Open(const std::string& path,
                                      int64_t sequence_length, int64_t vocab) {
  // A sequence of one token has no label; beyond int32 no op counts.
  if (sequence_length < 2 || sequence_length > INT32_MAX) {
    return InvalidInput("", "sequence_length", absl::StrCat(sequence_length),
                        absl::StrCat("must lie in [2, ", INT32_MAX, "]"), "");
  }
  SDP_ASSIGN_OR_RETURN(DatasetFile file, ReadDatasetFile(path, vocab));
  Dataset dataset;
  dataset.input_ids_ = std::move(file.input_ids);
  dataset.loss_mask_ = std::move(file.loss_mask);
  dataset.doc_offsets_ = std::move(file.doc_offsets);
  dataset.stream_ = file.stream;
  dataset.sequence_length_ = sequence_length;
  dataset.sequences_ = file.stream ? dataset.tokens() / sequence_length
                                   : dataset.doc_offsets_.size() - 1;
  if (dataset.sequences_ == 0) {
    return InvalidInput(
        path, "input_ids", absl::StrCat(dataset.tokens(), " tokens"),
        absl::StrCat("fewer than one sequence of ", sequence_length),
        "lower sequence_length or add data");
  }
  for (uint64_t i = 0; i < dataset.sequences_; ++i) {
    dataset.valid_tokens_ += dataset.LabelCount(i);
  }
  if (dataset.valid_tokens_ == 0) {
    return InvalidInput(
        path, "loss_mask", "",
        absl::StrCat("no label in any of ", dataset.sequences_,
                     " sequences of ", sequence_length, " tokens"),
        "raise sequence_length if answers are cut off, or mark the tokens to "
        "learn with slidedp-prepare");
  }
  return dataset;
}

std::pair<uint64_t, uint64_t> Dataset::Extent(uint64_t sequence) const {
  SDP_CHECK(sequence < sequences_, "no such sequence");
  const uint64_t length = sequence_length_;
  if (stream_) return {sequence * length, (sequence + 1) * length};
  const uint64_t begin = doc_offsets_[sequence];
  const uint64_t end = doc_offsets_[sequence + 1];
  return {begin, std::min(end, begin + length)};
}

uint64_t Dataset::LabelCount(uint64_t sequence) const {
  const auto [begin, end] = Extent(sequence);
  // The first token is nobody's label.
  return std::count(loss_mask_.begin() + begin + 1, loss_mask_.begin() + end,
                    uint8_t{1});
}

void Dataset::Fill(uint64_t sequence, int32_t* ids, int32_t* labels) const {
  const auto [begin, end] = Extent(sequence);
  const uint64_t length = end - begin;
  std::copy(input_ids_.begin() + begin, input_ids_.begin() + end, ids);
  std::fill(ids + length, ids + sequence_length_, 0);
  std::fill(labels, labels + sequence_length_, -1);
  for (uint64_t t = 0; t + 1 < length; ++t) {
    if (loss_mask_[begin + t + 1] == 1) labels[t] = input_ids_[begin + t + 1];
  }
}

}  // namespace slidedp::data
