// Writes dataset files, good and broken.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "common/base/fd.h"
#include "common/model/safetensors.h"
#include "gtest/gtest.h"
#include "worker/data/dataset.h"

namespace slidedp::data {

struct RawTensor {
  std::string name;
  model::DType dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};

template <typename T>
std::string Bytes(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()),
                     values.size() * sizeof(T));
}

// A dataset file's contents; edit, then Encode.
struct RawDataset {
  RawDataset(const std::vector<int32_t>& ids, const std::vector<uint8_t>& mask,
             const std::vector<int64_t>& offsets, const std::string& layout)
      : metadata{{"format", "slidedp-dataset"},
                 {"version", "1"},
                 {"layout", layout},
                 {"tokenizer_sha256", std::string(64, '0')}},
        tensors{{"input_ids",
                 model::DType::kI32,
                 {int64_t(ids.size())},
                 Bytes(ids)},
                {"loss_mask",
                 model::DType::kU8,
                 {int64_t(mask.size())},
                 Bytes(mask)},
                {"doc_offsets",
                 model::DType::kI64,
                 {int64_t(offsets.size())},
                 Bytes(offsets)}} {}

  // Longest elements first, so that each is aligned.
  std::string Encode() const {
    std::vector<model::TensorEntry> entries;
    std::string data;
    for (auto tensor = tensors.rbegin(); tensor != tensors.rend(); ++tensor) {
      entries.push_back({tensor->name, tensor->dtype, tensor->shape, 0, 0});
      data += tensor->bytes;
    }
    return model::EncodeSafetensorsHeader(entries, metadata) + data;
  }

  std::map<std::string, std::string> metadata;
  std::vector<RawTensor> tensors;
};

class DatasetTest : public ::testing::Test {
 protected:
  DatasetTest() {
    std::string name = ::testing::TempDir() + "slidedp-dataset-XXXXXX";
    const int fd = mkstemp(name.data());
    EXPECT_GE(fd, 0);
    close(fd);
    path_ = name;
  }
  ~DatasetTest() override { std::remove(path_.c_str()); }

  absl::StatusOr<Dataset> Open(const std::string& contents,
                               int64_t sequence_length, int64_t vocab = 1000,
                               const SequenceOptions& options = {}) {
    UniqueFd fd = OpenFile(path_, O_WRONLY | O_TRUNC).value();
    EXPECT_TRUE(
        PwriteFully(fd.get(), contents.data(), contents.size(), 0, path_).ok());
    return Dataset::Open(path_, sequence_length, vocab, options);
  }

  std::string path_;
};

// 0, 1, 2, ...
inline std::vector<int32_t> Counting(int64_t n) {
  std::vector<int32_t> ids(n);
  for (int64_t i = 0; i < n; ++i) ids[i] = static_cast<int32_t>(i);
  return ids;
}

inline RawDataset CountingStream(int64_t tokens) {
  return RawDataset(Counting(tokens), std::vector<uint8_t>(tokens, 1),
                    {0, tokens}, "stream");
}

}  // namespace slidedp::data
