// The system calls that change what is on a disk, through one object, so that a
// test can make any of them fail, end the process there, or tell what a power
// failure may leave.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/base/fd.h"

namespace slidedp {

// Thread-safe. Errors name the path. Every process that checkpoints uses one of
// these as it stands; only tests derive from it.
class DiskCalls {
 public:
  virtual ~DiskCalls() = default;

  virtual absl::Status MakeFolder(const std::string& path);
  // A new file of an open folder, for reading and writing; `path` for messages.
  virtual absl::StatusOr<UniqueFd> Create(int folder, const std::string& name,
                                          const std::string& path);
  virtual absl::Status Truncate(int fd, uint64_t bytes,
                                const std::string& path);
  // Of an empty file: its size, with room on the disk.
  virtual absl::Status Reserve(int fd, uint64_t bytes, const std::string& path);
  virtual absl::Status Write(int fd, const void* data, size_t bytes,
                             uint64_t offset, const std::string& path);
  // Of a file, what is in it; of a folder, the names in it.
  virtual absl::Status Sync(int fd, const std::string& path);
  absl::Status SyncFolder(const std::string& path);
  // A whole new file of an open folder, synced.
  absl::Status WriteNew(int folder, const std::string& name,
                        absl::string_view contents, const std::string& path);
  // Onto nothing or, for a folder, onto an empty one.
  virtual absl::Status Rename(const std::string& from, const std::string& to);
  virtual absl::Status Unlink(int folder, const std::string& name,
                              const std::string& path);
  virtual absl::Status RemoveFolder(const std::string& path);

 private:
  // Before the call of that name. Not 0: it fails with this errno.
  virtual int Before(const char* call, const std::string& path) { return 0; }
  absl::Status Check(const char* call, const std::string& path);
};

// The one for everything but tests.
DiskCalls& RealDiskCalls();

}  // namespace slidedp
