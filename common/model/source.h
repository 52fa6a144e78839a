// The tensors of a Hugging Face model, wherever its shards' descriptors come
// from: opened by the user's process, and passed on to the daemon.
#pragma once

#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "common/base/fd.h"
#include "common/model/layout.h"
#include "common/model/safetensors.h"

namespace slidedp::model {

struct SourceFile {
  std::string name;  // "model-00001-of-00002.safetensors", no folder
  UniqueFd fd;
  SafetensorsHeader header;
};

class TensorSource {
 public:
  struct Ref {
    const SourceFile* file;
    const TensorEntry* entry;
  };

  // Parses every file's header. A name in two files is an error.
  static absl::StatusOr<TensorSource> FromFiles(
      std::vector<std::pair<std::string, UniqueFd>> files);

  const std::vector<SourceFile>& files() const { return files_; }
  // Null entry if absent.
  Ref Find(absl::string_view name) const;

 private:
  std::vector<SourceFile> files_;
  absl::flat_hash_map<std::string, Ref> by_name_;
};

// Opens DIR/model.safetensors, or the shards that DIR/*.index.json names and
// nothing else. Runs as the user.
absl::StatusOr<TensorSource> OpenModelFolder(const std::string& folder);

// Every tensor of `layout` is there, with its shape, in BF16, F16 or F32. A
// tied model may also hold lm_head.weight; it must equal the embedding (checked
// where data is read). Missing tensors are all named.
absl::Status ValidateSource(const StateLayout& layout,
                            const TensorSource& source);

// Reads a whole tensor as float32 (exact from BF16, F16, F32).
// [first, first + count) in elements.
absl::Status ReadAsFloat(const TensorSource::Ref& ref, uint64_t first,
                         uint64_t count, float* out);

}  // namespace slidedp::model
