#include "common/model/output.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/model/copy_files.h"

namespace slidedp::model {
namespace {

constexpr char kIndexFile[] = "model.safetensors.index.json";
constexpr uint64_t kMaxIndexBytes = 64 * kMiB;

struct SplitPath {
  std::string parent, name;
};

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

std::string Join(const SplitPath& parts) {
  return parts.parent == "/" ? absl::StrCat("/", parts.name)
                             : absl::StrCat(parts.parent, "/", parts.name);
}

absl::StatusOr<bool> IsEmptyFolder(const std::string& path) {
  DIR* folder = opendir(path.c_str());
  if (folder == nullptr) {
    return ErrnoStatus(errno, absl::StrCat(path, ": open folder"));
  }
  bool empty = true;
  while (const dirent* entry = readdir(folder)) {
    if (std::strcmp(entry->d_name, ".") != 0 &&
        std::strcmp(entry->d_name, "..") != 0) {
      empty = false;
    }
  }
  closedir(folder);
  return empty;
}

// Only what Create makes, plain files, is removed; anything else stays and
// makes the rmdir fail.
void RemoveFolder(const std::string& path, int fd) {
  if (DIR* folder = fdopendir(fcntl(fd, F_DUPFD_CLOEXEC, 0));
      folder != nullptr) {
    rewinddir(folder);
    while (const dirent* entry = readdir(folder)) {
      unlinkat(fd, entry->d_name, 0);
    }
    closedir(folder);
  }
  rmdir(path.c_str());
}

absl::StatusOr<UniqueFd> OpenFolder(const std::string& path) {
  return OpenFile(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
}

// Whether `path` still leads to the open folder.
bool StillThere(const std::string& path, int fd) {
  struct stat by_path, by_fd;
  return lstat(path.c_str(), &by_path) == 0 && fstat(fd, &by_fd) == 0 &&
         by_path.st_dev == by_fd.st_dev && by_path.st_ino == by_fd.st_ino;
}

absl::Status CheckSpace(const std::string& parent, uint64_t needed_bytes) {
  struct statvfs info;
  if (statvfs(parent.c_str(), &info) != 0) {
    return ErrnoStatus(errno, absl::StrCat(parent, ": statvfs"));
  }
  uint64_t free_bytes;
  if (__builtin_mul_overflow(static_cast<uint64_t>(info.f_bavail),
                             static_cast<uint64_t>(info.f_frsize),
                             &free_bytes)) {
    free_bytes = UINT64_MAX;
  }
  if (free_bytes < needed_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat(parent, ": the trained model takes ",
                     FormatBytes(needed_bytes), ", ", FormatBytes(free_bytes),
                     " are free; make room or choose another disk"));
  }
  return absl::OkStatus();
}

absl::Status Reserve(int fd, uint64_t bytes, const std::string& path) {
  int error;
  do {
    error = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  } while (error == EINTR);
  if (error == 0) return absl::OkStatus();
  return Annotate(
      ErrnoStatus(error, absl::StrCat("reserve ", FormatBytes(bytes))), path);
}

}  // namespace

absl::Status CheckOutputPath(const std::string& path) {
  SDP_ASSIGN_OR_RETURN(SplitPath parts, Split(path));
  struct stat info;
  if (stat(parts.parent.c_str(), &info) != 0) {
    return Annotate(
        ErrnoStatus(errno, absl::StrCat("parent folder ", parts.parent)), path);
  }
  if (!S_ISDIR(info.st_mode)) {
    return InvalidInput(
        path, "", "",
        absl::StrCat("its parent ", parts.parent, " is not a folder"), "");
  }
  if (access(parts.parent.c_str(), W_OK | X_OK) != 0) {
    return Annotate(
        ErrnoStatus(errno, absl::StrCat("parent folder ", parts.parent,
                                        " is not writable")),
        path);
  }
  std::string target = Join(parts);
  if (lstat(target.c_str(), &info) != 0) {
    if (errno == ENOENT) return absl::OkStatus();
    return ErrnoStatus(errno, path);
  }
  if (!S_ISDIR(info.st_mode)) {
    return InvalidInput(path, "", "",
                        S_ISLNK(info.st_mode) ? "is a symbolic link"
                                              : "exists and is not a folder",
                        "give a new path");
  }
  SDP_ASSIGN_OR_RETURN(bool empty, IsEmptyFolder(target));
  if (!empty) {
    return InvalidInput(path, "", "", "exists and is not empty",
                        "give a new path or remove what is there");
  }
  return absl::OkStatus();
}

absl::Status OutputFolder::MakeTemporary() {
  // A second round only after a leftover was removed, or lost to a rival.
  for (int attempt = 0; attempt < 3; ++attempt) {
    bool is_new = mkdir(temporary_.c_str(), 0777) == 0;
    if (!is_new && errno != EEXIST) {
      return ErrnoStatus(errno, absl::StrCat(temporary_, ": create"));
    }
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
      if (!is_new) {
        return Annotate(ErrnoStatus(errno, "lock"),
                        absl::StrCat(temporary_,
                                     ": left by another process; if none is "
                                     "running, remove it by hand"));
      }
    }
    if (!StillThere(temporary_, folder->get())) continue;
    if (is_new) {
      folder_ = *std::move(folder);
      return absl::OkStatus();
    }
    RemoveFolder(temporary_, folder->get());
    if (StillThere(temporary_, folder->get())) {
      return InvalidInput(temporary_, "", "",
                          "a leftover that can not be removed",
                          "remove it by hand");
    }
  }
  return absl::AlreadyExistsError(
      absl::StrCat(temporary_, ": other processes keep making this folder"));
}

absl::Status OutputFolder::LayOutShards(const TensorSource& source,
                                        const StateLayout& layout) {
  absl::flat_hash_set<std::string> trained;
  for (const Unit& unit : layout.units) {
    for (const Tensor& tensor : unit.tensors) trained.insert(tensor.name);
  }
  // A tied model's file may hold the head as well; it is written too.
  if (layout.tied()) trained.insert(kHeadName);

  uint64_t total_bytes = 0;
  for (const SourceFile& file : source.files()) {
    if (file.name.empty() || absl::StrContains(file.name, '/')) {
      return InvalidInput(temporary_, "shard", file.name,
                          "not a plain file name", "");
    }
    total_bytes += file.header.file_bytes;
  }
  SDP_RETURN_IF_ERROR(CheckSpace(temporary_, total_bytes));
  for (const SourceFile& file : source.files()) {
    std::string path = absl::StrCat(temporary_, "/", file.name);
    UniqueFd fd(openat(folder_.get(), file.name.c_str(),
                       O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                       0666));
    if (!fd.valid()) {
      return ErrnoStatus(errno, absl::StrCat(path, ": create"));
    }
    SDP_RETURN_IF_ERROR(Reserve(fd.get(), file.header.file_bytes, path));
    SDP_RETURN_IF_ERROR(
        CopyRange(file.fd.get(), fd.get(), 0, file.header.data_begin, path));
    for (const TensorEntry& entry : file.header.tensors) {
      if (trained.contains(entry.name)) continue;
      SDP_RETURN_IF_ERROR(
          CopyRange(file.fd.get(), fd.get(), entry.begin, entry.end, path));
    }
    names_.push_back(path);
    files_.push_back(std::move(fd));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> TemporaryOutputFolder(const std::string& path,
                                                  const std::string& tag) {
  if (tag.empty() || absl::StrContains(tag, '/') ||
      absl::StrContains(tag, '\0')) {
    return InvalidInput(path, "tag", tag, "not a file name part", "");
  }
  SDP_ASSIGN_OR_RETURN(SplitPath parts, Split(path));
  return Join({parts.parent, absl::StrCat(".", parts.name, ".tmp-", tag)});
}

absl::StatusOr<std::unique_ptr<OutputFolder>> OutputFolder::Create(
    const std::string& path, const std::string& source_folder,
    const TensorSource& source, const StateLayout& layout,
    const std::string& tag) {
  std::unique_ptr<OutputFolder> output(new OutputFolder);
  SDP_ASSIGN_OR_RETURN(output->temporary_, TemporaryOutputFolder(path, tag));
  SDP_RETURN_IF_ERROR(CheckOutputPath(path));
  SDP_ASSIGN_OR_RETURN(SplitPath parts, Split(path));
  output->path_ = Join(parts);
  bool single = source.files().size() == 1 &&
                source.files().front().name == "model.safetensors";
  if (!single) {
    SDP_ASSIGN_OR_RETURN(
        output->index_,
        ReadFile(absl::StrCat(source_folder, "/", kIndexFile), kMaxIndexBytes));
  }
  SDP_RETURN_IF_ERROR(output->MakeTemporary());
  SDP_RETURN_IF_ERROR(
      CopyCompanions(source_folder, output->folder_.get(), output->temporary_));
  SDP_RETURN_IF_ERROR(output->LayOutShards(source, layout));
  return output;
}

OutputFolder::~OutputFolder() {
  if (!committed_ && folder_.valid()) RemoveFolder(temporary_, folder_.get());
}

absl::Status OutputFolder::Commit() {
  for (size_t i = 0; i < files_.size(); ++i) {
    if (fsync(files_[i].get()) != 0) {
      return ErrnoStatus(errno, absl::StrCat(names_[i], ": fsync"));
    }
  }
  if (!index_.empty()) {
    SDP_RETURN_IF_ERROR(
        WriteFileAtomically(absl::StrCat(temporary_, "/", kIndexFile), index_));
  }
  if (fsync(folder_.get()) != 0) {
    return ErrnoStatus(errno, absl::StrCat(temporary_, ": fsync"));
  }
  // Onto nothing or an empty folder; anything else makes it fail.
  if (rename(temporary_.c_str(), path_.c_str()) != 0) {
    return ErrnoStatus(errno, absl::StrCat(path_, ": put in place"));
  }
  committed_ = true;
  SDP_ASSIGN_OR_RETURN(SplitPath parts, Split(path_));
  return FsyncFolder(parts.parent);
}

}  // namespace slidedp::model
