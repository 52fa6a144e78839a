// Writing a trained model as a Hugging Face folder, by the user's process. Each
// output shard is its source shard with the trained tensors' bytes replaced:
// same key set, header, shard map and dtypes. Complete or absent.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/disk_calls.h"
#include "common/model/source.h"
#include "common/model/temporary_folder.h"

namespace slidedp::model {

class OutputFolder {
 public:
  // Makes TemporaryFolder::PathOf(path, tag), copies config.json, generation
  // config, tokenizer, chat template and licence files from `source_folder`,
  // and lays out every shard at full size (fallocate: a full disk shows here):
  // header and tensors that are not trained are copied. `path` must not exist
  // or be an empty folder. A temporary folder that a killed process left under
  // the same tag is replaced; one that a living process holds is an error.
  static absl::StatusOr<std::unique_ptr<OutputFolder>> Create(
      const std::string& path, const std::string& source_folder,
      const TensorSource& source, const StateLayout& layout,
      const std::string& tag, DiskCalls& calls = RealDiskCalls());

  // Writable, one per source.files(), in that order; the daemon fills in the
  // trained tensors at the source's offsets.
  const std::vector<UniqueFd>& files() const { return files_; }

  // fsync of all files, the index, the folder; rename into place; fsync of the
  // parent.
  absl::Status Commit();

 private:
  explicit OutputFolder(DiskCalls& calls) : calls_(calls) {}
  absl::Status LayOutShards(const TensorSource& source,
                            const StateLayout& layout);

  DiskCalls& calls_;
  std::optional<TemporaryFolder> folder_;  // removed unless committed
  std::vector<std::string> names_;
  std::vector<UniqueFd> files_;
  std::string index_;  // bytes of the source's index; empty: one file
};

// Whether `path` could be an output: absent or empty, its parent a writable
// folder. For submit-time checks.
absl::Status CheckOutputPath(const std::string& path);

}  // namespace slidedp::model
