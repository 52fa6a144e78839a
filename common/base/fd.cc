#include "common/base/fd.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <limits>
#include <utility>

#include "common/base/status.h"

namespace slidedp {
namespace {

absl::Status CheckRange(size_t bytes, uint64_t offset, absl::string_view name) {
  constexpr uint64_t kMaxOffset = std::numeric_limits<off_t>::max();
  if (offset > kMaxOffset || bytes > kMaxOffset - offset) {
    return absl::OutOfRangeError(absl::StrCat(
        name, ": ", bytes, " bytes at offset ", offset, " is no file range"));
  }
  return absl::OkStatus();
}

std::string FolderOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

absl::Status Fsync(int fd, absl::string_view name) {
  // Not repeated on EINTR or any other error: after a failed fsync the kernel
  // may have dropped the dirty pages, so a second success proves nothing.
  if (fsync(fd) != 0) return ErrnoStatus(errno, absl::StrCat(name, ": fsync"));
  return absl::OkStatus();
}

// A new file beside `path`; O_EXCL, so nobody else's file is ever touched.
absl::StatusOr<UniqueFd> OpenTemporary(const std::string& path,
                                       std::string* temporary) {
  static std::atomic<uint64_t> counter{0};
  for (int attempt = 0; attempt < 1000; ++attempt) {
    *temporary = absl::StrCat(path, ".tmp-", getpid(), "-",
                              counter.fetch_add(1, std::memory_order_relaxed));
    absl::StatusOr<UniqueFd> fd =
        OpenFile(*temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW);
    if (fd.ok() || fd.status().code() != absl::StatusCode::kAlreadyExists) {
      return fd;
    }
  }
  return absl::AlreadyExistsError(
      absl::StrCat(path, ".tmp-*: a thousand leftover files; remove them"));
}

}  // namespace

UniqueFd& UniqueFd::operator=(UniqueFd&& other) noexcept {
  if (this != &other) {
    Reset();
    fd_ = other.Release();
  }
  return *this;
}

int UniqueFd::Release() { return std::exchange(fd_, -1); }

void UniqueFd::Reset() {
  // On Linux the descriptor is gone even if close fails with EINTR.
  if (fd_ >= 0) close(Release());
}

absl::StatusOr<UniqueFd> OpenFile(const std::string& path, int flags,
                                  mode_t mode) {
  int fd;
  do {
    fd = open(path.c_str(), flags | O_CLOEXEC, mode);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) return ErrnoStatus(errno, absl::StrCat(path, ": open"));
  return UniqueFd(fd);
}

absl::StatusOr<uint64_t> RegularFileBytes(int fd, absl::string_view name) {
  struct stat info;
  if (fstat(fd, &info) != 0) {
    return ErrnoStatus(errno, absl::StrCat(name, ": fstat"));
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": not a regular file"));
  }
  return static_cast<uint64_t>(info.st_size);
}

absl::Status PreadFully(int fd, void* dst, size_t bytes, uint64_t offset,
                        absl::string_view name) {
  SDP_RETURN_IF_ERROR(CheckRange(bytes, offset, name));
  size_t done = 0;
  while (done < bytes) {
    const ssize_t got = pread(fd, static_cast<char*>(dst) + done, bytes - done,
                              static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(errno, absl::StrCat(name, ": read"));
    if (got == 0) {
      return absl::OutOfRangeError(
          absl::StrCat(name, ": ends at byte ", offset + done, ", but ", bytes,
                       " bytes at offset ", offset, " were asked for"));
    }
    done += static_cast<size_t>(got);
  }
  return absl::OkStatus();
}

absl::Status PwriteFully(int fd, const void* src, size_t bytes, uint64_t offset,
                         absl::string_view name) {
  SDP_RETURN_IF_ERROR(CheckRange(bytes, offset, name));
  size_t done = 0;
  while (done < bytes) {
    const ssize_t put = pwrite(fd, static_cast<const char*>(src) + done,
                               bytes - done, static_cast<off_t>(offset + done));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return ErrnoStatus(errno, absl::StrCat(name, ": write"));
    if (put == 0) {
      return absl::DataLossError(absl::StrCat(name, ": write took no bytes"));
    }
    done += static_cast<size_t>(put);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadFile(const std::string& path,
                                     uint64_t max_bytes) {
  // O_NONBLOCK: opening a FIFO without a writer must not hang.
  SDP_ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(path, O_RDONLY | O_NONBLOCK));
  SDP_ASSIGN_OR_RETURN(uint64_t size, RegularFileBytes(fd.get(), path));
  const auto too_long = [&] {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": longer than the limit of ", max_bytes, " bytes"));
  };
  if (size > max_bytes) return too_long();
  // Until the end, not until `size`: files of /proc and /sys say 0.
  std::string contents;
  size_t done = 0;
  while (true) {
    contents.resize(std::max<size_t>(size, done) + 4096);
    const ssize_t got =
        read(fd.get(), contents.data() + done, contents.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus(errno, absl::StrCat(path, ": read"));
    if (got == 0) break;
    done += static_cast<size_t>(got);
    if (done > max_bytes) return too_long();
  }
  contents.resize(done);
  return contents;
}

absl::Status WriteFileAtomically(const std::string& path,
                                 absl::string_view contents) {
  std::string temporary;
  SDP_ASSIGN_OR_RETURN(UniqueFd fd, OpenTemporary(path, &temporary));
  absl::Status status =
      PwriteFully(fd.get(), contents.data(), contents.size(), 0, temporary);
  if (status.ok()) status = Fsync(fd.get(), temporary);
  if (status.ok() && close(fd.Release()) != 0) {
    status = ErrnoStatus(errno, absl::StrCat(temporary, ": close"));
  }
  if (status.ok() && rename(temporary.c_str(), path.c_str()) != 0) {
    status = ErrnoStatus(errno, absl::StrCat(path, ": rename"));
  }
  if (!status.ok()) {
    unlink(temporary.c_str());
    return status;
  }
  return FsyncFolder(FolderOf(path));
}

absl::Status FsyncFolder(const std::string& path) {
  SDP_ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(path, O_RDONLY | O_DIRECTORY));
  return Fsync(fd.get(), path);
}

}  // namespace slidedp
