#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "common/base/check.h"
#include "common/base/fd.h"
#include "tests/testing/random.h"
#include "tests/testing/tiny_model.h"

namespace slidedp::testing {
namespace {

template <typename T>
void AppendBytes(const std::vector<T>& values, std::string& bytes) {
  bytes.append(reinterpret_cast<const char*>(values.data()),
               values.size() * sizeof(T));
}

// 0 = first, `tokens` = last, strictly ascending.
std::vector<int64_t> RandomOffsets(const TokenDatasetOptions& options,
                                   Random& random) {
  SDP_CHECK(options.documents >= 1 && options.documents <= options.tokens,
            "documents must be 1 to tokens");
  std::set<int64_t> cuts = {0, static_cast<int64_t>(options.tokens)};
  while (cuts.size() < options.documents + 1) {
    cuts.insert(static_cast<int64_t>(random.Below(options.tokens)));
  }
  return {cuts.begin(), cuts.end()};
}

}  // namespace

void WriteTokenDataset(const std::string& path,
                       const TokenDatasetOptions& options) {
  using Mask = TokenDatasetOptions::Mask;
  Random random(options.seed);
  std::vector<int64_t> offsets = RandomOffsets(options, random);
  std::vector<int32_t> ids;
  std::vector<uint8_t> mask;
  for (size_t document = 0; document + 1 < offsets.size(); ++document) {
    int64_t length = offsets[document + 1] - offsets[document];
    for (int64_t i = 0; i < length; ++i) {
      ids.push_back(static_cast<int32_t>(
          random.Below(static_cast<uint64_t>(options.vocab))));
      bool label =
          options.mask == Mask::kAll ||
          (options.mask == Mask::kRandomHalf && random.Below(2) == 0) ||
          (options.mask == Mask::kPrompt && i >= length / 3);
      if (document < options.masked_documents) label = false;
      mask.push_back(label ? 1 : 0);
    }
  }
  const auto n = static_cast<int64_t>(ids.size());
  std::vector<model::TensorEntry> entries = {
      {"doc_offsets",
       model::DType::kI64,
       {static_cast<int64_t>(offsets.size())},
       0,
       0},
      {"input_ids", model::DType::kI32, {n}, 0, 0},
      {"loss_mask", model::DType::kU8, {n}, 0, 0},
  };
  std::string bytes = model::EncodeSafetensorsHeader(
      entries, {{"format", "slidedp-dataset"},
                {"version", "1"},
                {"layout", options.stream ? "stream" : "documents"},
                {"tokenizer_sha256", std::string(64, '0')}});
  AppendBytes(offsets, bytes);
  AppendBytes(ids, bytes);
  AppendBytes(mask, bytes);
  absl::Status status = WriteFileAtomically(path, bytes);
  SDP_CHECK(status.ok(), status.ToString());
}

}  // namespace slidedp::testing
