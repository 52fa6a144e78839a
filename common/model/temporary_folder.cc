#include "common/model/temporary_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/base/units.h"

namespace slidedp::model {
namespace {

absl::StatusOr<UniqueFd> OpenFolder(const std::string& path) {
  return OpenFile(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
}

// Whether `path` still leads to the open folder.
bool StillThere(const std::string& path, int fd) {
  struct stat by_path, by_fd;
  return lstat(path.c_str(), &by_path) == 0 && fstat(fd, &by_fd) == 0 &&
         by_path.st_dev == by_fd.st_dev && by_path.st_ino == by_fd.st_ino;
}

std::vector<std::string> NamesIn(int fd) {
  std::vector<std::string> names;
  DIR* folder = fdopendir(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (folder == nullptr) return names;
  rewinddir(folder);
  while (const dirent* entry = readdir(folder)) {
    if (std::strcmp(entry->d_name, ".") != 0 &&
        std::strcmp(entry->d_name, "..") != 0) {
      names.emplace_back(entry->d_name);
    }
  }
  closedir(folder);
  return names;
}

}  // namespace

std::string SplitPath::Join() const {
  return parent == "/" ? absl::StrCat("/", name)
                       : absl::StrCat(parent, "/", name);
}

absl::StatusOr<SplitPath> Split(const std::string& path) {
  std::string trimmed = path;
  while (trimmed.size() > 1 && trimmed.back() == '/') trimmed.pop_back();
  size_t slash = trimmed.rfind('/');
  SplitPath parts;
  parts.name = slash == std::string::npos ? trimmed : trimmed.substr(slash + 1);
  parts.parent = slash == std::string::npos ? "."
                 : slash == 0               ? "/"
                                            : trimmed.substr(0, slash);
  if (parts.name.empty() || parts.name == "." || parts.name == ".." ||
      absl::StrContains(parts.name, '\0')) {
    return InvalidInput(path, "", "", "not the path of a new folder",
                        "give a name below an existing folder");
  }
  return parts;
}

absl::Status CheckSpace(const std::string& folder, uint64_t needed_bytes,
                        absl::string_view what) {
  struct statvfs info;
  if (statvfs(folder.c_str(), &info) != 0) {
    return ErrnoStatus(errno, absl::StrCat(folder, ": statvfs"));
  }
  uint64_t free_bytes;
  if (__builtin_mul_overflow(static_cast<uint64_t>(info.f_bavail),
                             static_cast<uint64_t>(info.f_frsize),
                             &free_bytes)) {
    free_bytes = UINT64_MAX;
  }
  if (free_bytes >= needed_bytes) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      folder, ": ", what, " takes ", FormatBytes(needed_bytes), ", ",
      FormatBytes(free_bytes), " are free; make room or choose another disk"));
}

absl::Status RemovePlainFolder(const std::string& path, int fd,
                               DiskCalls& calls) {
  absl::Status first;
  for (const std::string& name : NamesIn(fd)) {
    const absl::Status status =
        calls.Unlink(fd, name, absl::StrCat(path, "/", name));
    if (first.ok()) first = status;
  }
  if (!first.ok()) return first;
  return calls.RemoveFolder(path);
}

absl::StatusOr<std::string> TemporaryFolder::PathOf(const std::string& path,
                                                    const std::string& tag) {
  if (tag.empty() || absl::StrContains(tag, '/') ||
      absl::StrContains(tag, '\0')) {
    return InvalidInput(path, "tag", tag, "not a file name part", "");
  }
  SDP_ASSIGN_OR_RETURN(SplitPath parts, Split(path));
  return SplitPath{parts.parent, absl::StrCat(".", parts.name, ".tmp-", tag)}
      .Join();
}

absl::StatusOr<TemporaryFolder> TemporaryFolder::Create(const std::string& path,
                                                        const std::string& tag,
                                                        DiskCalls& calls) {
  SDP_ASSIGN_OR_RETURN(std::string temporary, PathOf(path, tag));
  SDP_ASSIGN_OR_RETURN(SplitPath parts, Split(path));
  TemporaryFolder folder(parts.Join(), std::move(temporary), calls);
  SDP_RETURN_IF_ERROR(folder.Make());
  return folder;
}

TemporaryFolder::TemporaryFolder(TemporaryFolder&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::move(other.temporary_)),
      calls_(other.calls_),
      folder_(std::move(other.folder_)) {}

TemporaryFolder::~TemporaryFolder() {
  if (!folder_.valid()) return;
  (void)RemovePlainFolder(temporary_, folder_.get(), *calls_);
}

absl::Status TemporaryFolder::Make() {
  // A second round only after a leftover was removed, or lost to a rival.
  for (int attempt = 0; attempt < 3; ++attempt) {
    const absl::Status made = calls_->MakeFolder(temporary_);
    if (!made.ok() && !absl::IsAlreadyExists(made)) return made;
    absl::StatusOr<UniqueFd> folder = OpenFolder(temporary_);
    if (!folder.ok()) {
      if (absl::IsNotFound(folder.status())) continue;
      return folder.status();
    }
    if (flock(folder->get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK) {
        return absl::AlreadyExistsError(absl::StrCat(
            temporary_, ": another process is writing this output"));
      }
      // Some cluster file systems have no flock. A new folder is ours all the
      // same; whose an old one is can't be told.
      if (!made.ok()) {
        return Annotate(ErrnoStatus(errno, "lock"),
                        absl::StrCat(temporary_,
                                     ": left by another process; if none is "
                                     "running, remove it by hand"));
      }
    }
    if (!StillThere(temporary_, folder->get())) continue;
    if (made.ok()) {
      folder_ = *std::move(folder);
      return absl::OkStatus();
    }
    if (!RemovePlainFolder(temporary_, folder->get(), *calls_).ok() &&
        StillThere(temporary_, folder->get())) {
      return InvalidInput(temporary_, "", "",
                          "a leftover that can not be removed",
                          "remove it by hand");
    }
  }
  return absl::AlreadyExistsError(
      absl::StrCat(temporary_, ": other processes keep making this folder"));
}

absl::Status TemporaryFolder::Commit() {
  SDP_RETURN_IF_ERROR(calls_->Sync(folder_.get(), temporary_));
  SDP_RETURN_IF_ERROR(calls_->Rename(temporary_, path_));
  folder_.Reset();  // in place: not to be removed
  SDP_ASSIGN_OR_RETURN(SplitPath parts, Split(path_));
  SDP_ASSIGN_OR_RETURN(UniqueFd parent,
                       OpenFile(parts.parent, O_RDONLY | O_DIRECTORY));
  return calls_->Sync(parent.get(), parts.parent);
}

}  // namespace slidedp::model
