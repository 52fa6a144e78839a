// Checkpoints on disk, by the user's process: FOLDER/step-00000100/ and its
// siblings. Complete or absent: a new one grows under a hidden name, its
// manifest is written last, and one rename shows it; an old one is hidden by
// one rename before any file of it goes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/disk_calls.h"
#include "common/checkpoint/files.h"
#include "common/checkpoint/manifest.h"
#include "common/model/source.h"
#include "common/model/temporary_folder.h"

namespace slidedp::checkpoint {

std::string FolderName(uint64_t step);  // "step-00000100"

class NewCheckpoint {
 public:
  // Makes `folder` if it is absent (its parent must be there), then the hidden
  // folder in it. Checks the space, copies what belongs to the model from
  // `source_folder`, and makes the files of `files`, of full size and empty.
  static absl::StatusOr<std::unique_ptr<NewCheckpoint>> Create(
      const std::string& folder, uint64_t step,
      const std::string& source_folder, const std::vector<File>& files,
      const std::string& tag, DiskCalls& calls = RealDiskCalls());
  // Where Create makes its hidden folder.
  static absl::StatusOr<std::string> HiddenPath(const std::string& folder,
                                                uint64_t step,
                                                const std::string& tag);

  // Writable, in the order of `files`; the daemon fills them in.
  const std::vector<UniqueFd>& fds() const { return fds_; }

  // `manifest` describes those files; what was copied is added to it. fsync of
  // all files, the manifest, the folder; rename; fsync of `folder`.
  absl::Status Commit(Manifest manifest);
  const std::string& path() const { return path_; }  // where it is then

 private:
  NewCheckpoint(model::TemporaryFolder hidden, std::string path,
                DiskCalls& calls)
      : hidden_(std::move(hidden)), path_(std::move(path)), calls_(calls) {}
  absl::Status CopyModel(const std::string& source_folder);

  model::TemporaryFolder hidden_;
  const std::string path_;
  DiskCalls& calls_;
  std::vector<std::string> names_;  // of fds_
  std::vector<UniqueFd> fds_;
  std::vector<FileEntry> copied_;
};

struct Found {
  uint64_t step;
  std::string path;
};
// Folders named like checkpoints that have a manifest, the newest first. An
// absent folder has none.
absl::StatusOr<std::vector<Found>> List(const std::string& folder);

// A job that begins anew must not find checkpoints in its folder: later ones
// than its own would be taken for its own.
absl::Status CheckNoneIn(const std::string& folder);

// Removes all but the newest `keep`, and hidden folders that dead processes
// left. What can't be removed is told, and stays.
absl::Status Prune(const std::string& folder, uint64_t keep,
                   DiskCalls& calls = RealDiskCalls());

// A job goes on from this step: later ones, damaged or of another way, get
// names that are no checkpoint's. Returns those.
absl::StatusOr<std::vector<std::string>> SetAside(
    const std::string& folder, uint64_t after_step,
    DiskCalls& calls = RealDiskCalls());

// An existing checkpoint's manifest, and that every file is there with its
// size. Checksums are for whoever reads the bytes.
absl::StatusOr<Manifest> ReadManifest(const std::string& path);

// CRC-32C of a file's first bytes, all of them there. `progress`, if given,
// gets each piece's size.
absl::StatusOr<uint32_t> ChecksumOf(
    int fd, uint64_t file_bytes, absl::string_view name,
    const std::function<void(uint64_t)>& progress = {});

// Reads a checkpoint's file to its end; DataLoss names the file if the bytes
// are not those of the entry.
absl::Status CheckChecksum(const std::string& path, const FileEntry& entry,
                           const std::function<void(uint64_t)>& progress = {});

}  // namespace slidedp::checkpoint
