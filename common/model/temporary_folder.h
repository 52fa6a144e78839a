// A folder that is made under another name and renamed into place when it is
// complete: its reader sees all of it or nothing. Runs as the user.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "common/base/disk_calls.h"
#include "common/base/fd.h"

namespace slidedp::model {

// A path as its last name and what stands before it.
struct SplitPath {
  std::string parent, name;
  std::string Join() const;
};
// "." and ".." and nothing are no names of a new folder.
absl::StatusOr<SplitPath> Split(const std::string& path);

// At least so many bytes are free for this user where `folder` lies.
absl::Status CheckSpace(const std::string& folder, uint64_t needed_bytes,
                        absl::string_view what);

class TemporaryFolder {
 public:
  // Where Create(path, tag) makes it: "PARENT/.NAME.tmp-TAG".
  static absl::StatusOr<std::string> PathOf(const std::string& path,
                                            const std::string& tag);
  // Leads to `path`. One that a killed process left under the same tag is
  // replaced; one that a living process holds is an error.
  static absl::StatusOr<TemporaryFolder> Create(
      const std::string& path, const std::string& tag,
      DiskCalls& calls = RealDiskCalls());
  TemporaryFolder(TemporaryFolder&& other) noexcept;
  TemporaryFolder& operator=(TemporaryFolder&&) = delete;
  // Removes it unless committed.
  ~TemporaryFolder();

  const std::string& path() const { return temporary_; }  // until committed
  int fd() const { return folder_.get(); }

  // Its files are synced and complete: fsync of the folder, rename to `path`,
  // which must not exist or be an empty folder, fsync of its parent.
  absl::Status Commit();

 private:
  TemporaryFolder(std::string path, std::string temporary, DiskCalls& calls)
      : path_(std::move(path)),
        temporary_(std::move(temporary)),
        calls_(&calls) {}
  absl::Status Make();

  std::string path_, temporary_;
  DiskCalls* calls_;
  UniqueFd folder_;  // flocked while we live; invalid: not ours to remove
};

// Removes `path`, an open folder `fd` of plain files only, and what is in it.
// What is not a plain file stays, and makes it fail.
absl::Status RemovePlainFolder(const std::string& path, int fd,
                               DiskCalls& calls);

}  // namespace slidedp::model
