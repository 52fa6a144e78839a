// The tensors of a dataset file, checked; internal to worker/data.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace slidedp::data {

struct DatasetFile {
  std::vector<int32_t> input_ids;    // [N], each in [0, vocab)
  std::vector<uint8_t> loss_mask;    // [N], 0 or 1
  std::vector<int64_t> doc_offsets;  // 0 < ... < N
  bool stream;                       // "layout" is "stream", not "documents"
};

// `path` is hostile: it may be anything, and of any size.
absl::StatusOr<DatasetFile> ReadDatasetFile(const std::string& path,
                                            int64_t vocab);

}  // namespace slidedp::data
