// What a benchmark trains: a folder of its own with a config.json and a dataset
// of random tokens.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "common/model/shapes.h"

namespace slidedp::ctl {

// A new folder of this user alone, removed with everything in it on
// destruction.
class ScratchFolder {
 public:
  // Below TMPDIR's value `parent`, or /tmp if that is empty.
  static absl::StatusOr<ScratchFolder> Create(const std::string& parent);
  ScratchFolder(ScratchFolder&& other) noexcept
      : path_(std::move(other.path_)) {
    other.path_.clear();
  }
  ScratchFolder& operator=(ScratchFolder&&) = delete;
  ~ScratchFolder();

  const std::string& path() const { return path_; }

 private:
  explicit ScratchFolder(std::string path) : path_(std::move(path)) {}
  std::string path_;
};

// FOLDER/model/config.json; the folder must exist.
absl::Status WriteBenchModel(const std::string& folder,
                             const model::Shape& shape);

// A "stream" dataset of `sequences` x `sequence_length` token ids in [0,
// vocab), as frequent as words are in text (Zipf's law), every one a label.
absl::Status WriteRandomTokens(const std::string& path, uint64_t sequences,
                               uint64_t sequence_length, int64_t vocab);

}  // namespace slidedp::ctl
