// Owned file descriptors and the complete forms of read and write.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace slidedp {

// Move-only owner of a file descriptor.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.Release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept;
  UniqueFd(const UniqueFd&) = delete;
  UniqueFd& operator=(const UniqueFd&) = delete;
  ~UniqueFd() { Reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int Release();
  void Reset();

 private:
  int fd_ = -1;
};

// open(2) with O_CLOEXEC. Errors name the path.
absl::StatusOr<UniqueFd> OpenFile(const std::string& path, int flags,
                                  mode_t mode = 0644);
// Size of a regular file; an error if `fd` is anything else. `name` is for the
// message.
absl::StatusOr<uint64_t> RegularFileBytes(int fd, absl::string_view name);
// Exactly `bytes` bytes at `offset`; a short file is an error.
absl::Status PreadFully(int fd, void* dst, size_t bytes, uint64_t offset,
                        absl::string_view name);
absl::Status PwriteFully(int fd, const void* src, size_t bytes, uint64_t offset,
                         absl::string_view name);
// A whole regular file of at most `max_bytes`.
absl::StatusOr<std::string> ReadFile(const std::string& path,
                                     uint64_t max_bytes);
// Temporary file in the same folder, write, fsync, rename, fsync of the folder.
absl::Status WriteFileAtomically(const std::string& path,
                                 absl::string_view contents);
absl::Status FsyncFolder(const std::string& path);

}  // namespace slidedp
