#include "common/base/disk_calls.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/base/units.h"

namespace slidedp {
namespace {

absl::Status Result(int result, const char* call, const std::string& path) {
  if (result == 0) return absl::OkStatus();
  return ErrnoStatus(errno, absl::StrCat(path, ": ", call));
}

}  // namespace

absl::Status DiskCalls::Check(const char* call, const std::string& path) {
  const int error = Before(call, path);
  if (error == 0) return absl::OkStatus();
  return ErrnoStatus(error, absl::StrCat(path, ": ", call));
}

absl::Status DiskCalls::MakeFolder(const std::string& path) {
  SDP_RETURN_IF_ERROR(Check("create", path));
  return Result(mkdir(path.c_str(), 0777), "create", path);
}

absl::StatusOr<UniqueFd> DiskCalls::Create(int folder, const std::string& name,
                                           const std::string& path) {
  SDP_RETURN_IF_ERROR(Check("create", path));
  UniqueFd fd(openat(folder, name.c_str(),
                     O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666));
  if (!fd.valid()) return ErrnoStatus(errno, absl::StrCat(path, ": create"));
  return fd;
}

absl::Status DiskCalls::Truncate(int fd, uint64_t bytes,
                                 const std::string& path) {
  SDP_RETURN_IF_ERROR(Check("set size", path));
  return Result(ftruncate(fd, static_cast<off_t>(bytes)), "set size", path);
}

absl::Status DiskCalls::Reserve(int fd, uint64_t bytes,
                                const std::string& path) {
  SDP_RETURN_IF_ERROR(Check("reserve", path));
  int error;
  do {
    error = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  } while (error == EINTR);
  if (error == 0) return absl::OkStatus();
  return ErrnoStatus(error,
                     absl::StrCat(path, ": reserve ", FormatBytes(bytes)));
}

absl::Status DiskCalls::Write(int fd, const void* data, size_t bytes,
                              uint64_t offset, const std::string& path) {
  SDP_RETURN_IF_ERROR(Check("write", path));
  return PwriteFully(fd, data, bytes, offset, path);
}

absl::Status DiskCalls::Sync(int fd, const std::string& path) {
  SDP_RETURN_IF_ERROR(Check("fsync", path));
  return Result(fsync(fd), "fsync", path);
}

absl::Status DiskCalls::SyncFolder(const std::string& path) {
  SDP_ASSIGN_OR_RETURN(const UniqueFd fd,
                       OpenFile(path, O_RDONLY | O_DIRECTORY));
  return Sync(fd.get(), path);
}

absl::Status DiskCalls::WriteNew(int folder, const std::string& name,
                                 absl::string_view contents,
                                 const std::string& path) {
  SDP_ASSIGN_OR_RETURN(const UniqueFd fd, Create(folder, name, path));
  SDP_RETURN_IF_ERROR(
      Write(fd.get(), contents.data(), contents.size(), 0, path));
  return Sync(fd.get(), path);
}

absl::Status DiskCalls::Rename(const std::string& from, const std::string& to) {
  SDP_RETURN_IF_ERROR(Check("rename", to));
  return Result(rename(from.c_str(), to.c_str()), "put in place", to);
}

absl::Status DiskCalls::Unlink(int folder, const std::string& name,
                               const std::string& path) {
  SDP_RETURN_IF_ERROR(Check("remove", path));
  return Result(unlinkat(folder, name.c_str(), 0), "remove", path);
}

absl::Status DiskCalls::RemoveFolder(const std::string& path) {
  SDP_RETURN_IF_ERROR(Check("remove", path));
  return Result(rmdir(path.c_str()), "remove", path);
}

DiskCalls& RealDiskCalls() {
  static DiskCalls calls;
  return calls;
}

}  // namespace slidedp
