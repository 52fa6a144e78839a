#include "common/checkpoint/folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/crc32c.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/model/copy_files.h"

namespace slidedp::checkpoint {
namespace {

constexpr absl::string_view kPrefix = "step-";
constexpr char kIndexFile[] = "model.safetensors.index.json";
constexpr uint64_t kMaxIndexBytes = 64 * kMiB;
constexpr uint64_t kPieceBytes = 4 * kMiB;

std::string Join(const std::string& folder, absl::string_view name) {
  return absl::StrCat(folder, "/", name);
}

// "step-00000100" and no other spelling of it.
bool StepOf(absl::string_view name, uint64_t& step) {
  return absl::StartsWith(name, kPrefix) &&
         absl::SimpleAtoi(name.substr(kPrefix.size()), &step) &&
         FolderName(step) == name;
}

absl::StatusOr<std::vector<std::string>> NamesIn(const std::string& folder) {
  std::vector<std::string> names;
  DIR* stream = opendir(folder.c_str());
  if (stream == nullptr) {
    if (errno == ENOENT) return names;
    return ErrnoStatus(errno, absl::StrCat(folder, ": open folder"));
  }
  while (const dirent* entry = readdir(stream)) names.push_back(entry->d_name);
  closedir(stream);
  return names;
}

// A folder that nobody holds goes, with its files.
absl::Status RemoveUnlocked(const std::string& path, DiskCalls& calls) {
  absl::StatusOr<UniqueFd> fd =
      OpenFile(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  if (!fd.ok()) return absl::OkStatus();  // not ours
  if (flock(fd->get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    return absl::OkStatus();
  }
  return model::RemovePlainFolder(path, fd->get(), calls);
}

// The folder of checkpoints. What is saved in it must not go with its name,
// whoever made that a moment ago.
absl::Status MakeParent(const std::string& folder, DiskCalls& calls) {
  struct stat info;
  const bool there = stat(folder.c_str(), &info) == 0;
  if (!there) {
    const absl::Status made = calls.MakeFolder(folder);
    if (!made.ok() && !absl::IsAlreadyExists(made)) return made;
  }
  SDP_ASSIGN_OR_RETURN(const model::SplitPath parts, model::Split(folder));
  const absl::Status synced = calls.SyncFolder(parts.parent);
  // One that we may not open was not given its name by us.
  return there && absl::IsPermissionDenied(synced) ? absl::OkStatus() : synced;
}

absl::StatusOr<FileEntry> EntryOf(const std::string& path,
                                  const std::string& name) {
  SDP_ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(path, O_RDONLY | O_NOFOLLOW));
  FileEntry entry;
  entry.name = name;
  SDP_ASSIGN_OR_RETURN(entry.bytes, RegularFileBytes(fd.get(), path));
  SDP_ASSIGN_OR_RETURN(entry.crc32c, ChecksumOf(fd.get(), entry.bytes, path));
  return entry;
}

}  // namespace

std::string FolderName(uint64_t step) {
  return absl::StrFormat("%s%08d", kPrefix, step);
}

absl::StatusOr<std::string> NewCheckpoint::HiddenPath(const std::string& folder,
                                                      uint64_t step,
                                                      const std::string& tag) {
  return model::TemporaryFolder::PathOf(Join(folder, FolderName(step)), tag);
}

absl::StatusOr<std::unique_ptr<NewCheckpoint>> NewCheckpoint::Create(
    const std::string& folder, uint64_t step, const std::string& source_folder,
    const std::vector<File>& files, const std::string& tag, DiskCalls& calls) {
  SDP_RETURN_IF_ERROR(MakeParent(folder, calls));
  const std::string path = Join(folder, FolderName(step));
  if (struct stat info; lstat(path.c_str(), &info) == 0) {
    return absl::AlreadyExistsError(absl::StrCat(
        path, ": exists already; name another folder for checkpoints"));
  }
  uint64_t total_bytes = 0;
  for (const File& file : files) total_bytes += file.bytes;
  SDP_RETURN_IF_ERROR(model::CheckSpace(folder, total_bytes, "a checkpoint"));
  SDP_ASSIGN_OR_RETURN(model::TemporaryFolder hidden,
                       model::TemporaryFolder::Create(path, tag, calls));
  std::unique_ptr<NewCheckpoint> made(
      new NewCheckpoint(std::move(hidden), path, calls));
  SDP_RETURN_IF_ERROR(made->CopyModel(source_folder));
  for (const File& file : files) {
    const std::string name = Join(made->hidden_.path(), file.name);
    SDP_ASSIGN_OR_RETURN(UniqueFd fd,
                         calls.Create(made->hidden_.fd(), file.name, name));
    SDP_RETURN_IF_ERROR(calls.Truncate(fd.get(), file.bytes, name));
    made->names_.push_back(name);
    made->fds_.push_back(std::move(fd));
  }
  return made;
}

absl::Status NewCheckpoint::CopyModel(const std::string& source_folder) {
  const std::string& to = hidden_.path();
  SDP_RETURN_IF_ERROR(
      model::CopyCompanions(source_folder, hidden_.fd(), to, calls_));
  const std::string index = Join(source_folder, kIndexFile);
  if (struct stat info; stat(index.c_str(), &info) == 0) {
    SDP_ASSIGN_OR_RETURN(const std::string text,
                         ReadFile(index, kMaxIndexBytes));
    SDP_RETURN_IF_ERROR(
        calls_.WriteNew(hidden_.fd(), kIndexFile, text, Join(to, kIndexFile)));
  }
  SDP_ASSIGN_OR_RETURN(std::vector<std::string> names, NamesIn(to));
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) {
    if (name == "." || name == "..") continue;
    SDP_ASSIGN_OR_RETURN(FileEntry entry, EntryOf(Join(to, name), name));
    copied_.push_back(std::move(entry));
  }
  return absl::OkStatus();
}

absl::Status NewCheckpoint::Commit(Manifest manifest) {
  for (size_t i = 0; i < fds_.size(); ++i) {
    SDP_RETURN_IF_ERROR(calls_.Sync(fds_[i].get(), names_[i]));
  }
  manifest.files.insert(manifest.files.end(), copied_.begin(), copied_.end());
  SDP_RETURN_IF_ERROR(calls_.WriteNew(hidden_.fd(), kManifestFile,
                                      ToJson(manifest),
                                      Join(hidden_.path(), kManifestFile)));
  return hidden_.Commit();
}

absl::StatusOr<std::vector<Found>> List(const std::string& folder) {
  SDP_ASSIGN_OR_RETURN(const std::vector<std::string> names, NamesIn(folder));
  std::vector<Found> found;
  for (const std::string& name : names) {
    uint64_t step;
    if (!StepOf(name, step)) continue;
    const std::string path = Join(folder, name);
    struct stat info;
    if (stat(Join(path, kManifestFile).c_str(), &info) != 0) continue;
    found.push_back({step, path});
  }
  std::sort(found.begin(), found.end(),
            [](const Found& a, const Found& b) { return a.step > b.step; });
  return found;
}

absl::Status Prune(const std::string& folder, uint64_t keep, DiskCalls& calls) {
  absl::Status first;
  auto note = [&first](const absl::Status& status) {
    if (first.ok()) first = status;
  };
  SDP_ASSIGN_OR_RETURN(const std::vector<Found> found, List(folder));
  for (size_t i = keep; i < found.size(); ++i) {
    const std::string hidden =
        Join(folder, absl::StrCat(".", FolderName(found[i].step), ".tmp-old"));
    note(calls.Rename(found[i].path, hidden));
  }
  SDP_ASSIGN_OR_RETURN(std::vector<std::string> names, NamesIn(folder));
  std::erase_if(names, [](const std::string& name) {
    return !absl::StartsWith(name, absl::StrCat(".", kPrefix)) ||
           !absl::StrContains(name, ".tmp-");
  });
  if (names.empty()) return first;
  // An old name that comes back after a power failure must not stand for a
  // folder whose files are gone.
  SDP_RETURN_IF_ERROR(calls.SyncFolder(folder));
  for (const std::string& name : names) {
    note(RemoveUnlocked(Join(folder, name), calls));
  }
  return first;
}

absl::StatusOr<std::vector<std::string>> SetAside(const std::string& folder,
                                                  uint64_t after_step,
                                                  DiskCalls& calls) {
  SDP_ASSIGN_OR_RETURN(const std::vector<Found> found, List(folder));
  std::vector<std::string> aside;
  for (const Found& each : found) {
    if (each.step <= after_step) continue;
    std::string to;
    struct stat info;
    int n = 0;
    do {
      to = Join(folder, absl::StrCat("aside-", FolderName(each.step),
                                     n == 0 ? "" : absl::StrCat(".", n)));
      ++n;
    } while (lstat(to.c_str(), &info) == 0);
    SDP_RETURN_IF_ERROR(calls.Rename(each.path, to));
    aside.push_back(to);
  }
  // Before the job goes on from an earlier one: nothing else tells which is its
  // own.
  if (!aside.empty()) SDP_RETURN_IF_ERROR(calls.SyncFolder(folder));
  return aside;
}

absl::Status CheckNoneIn(const std::string& folder) {
  SDP_ASSIGN_OR_RETURN(const std::vector<Found> found, List(folder));
  if (found.empty()) return absl::OkStatus();
  return InvalidInput(
      folder, "", "",
      absl::StrCat("holds checkpoints of an earlier job, the newest of step ",
                   found.front().step),
      "go on from them with --resume auto, or name another checkpoint.folder");
}

absl::StatusOr<Manifest> ReadManifest(const std::string& path) {
  const std::string file = Join(path, kManifestFile);
  struct stat info;
  if (stat(file.c_str(), &info) != 0 && errno == ENOENT) {
    return InvalidInput(path, "", "", "holds no manifest.json",
                        "give the folder of a complete checkpoint");
  }
  SDP_ASSIGN_OR_RETURN(const std::string text,
                       ReadFile(file, kMaxManifestBytes));
  SDP_ASSIGN_OR_RETURN(Manifest manifest, ParseManifest(text, file));
  for (const FileEntry& entry : manifest.files) {
    const std::string name = Join(path, entry.name);
    SDP_ASSIGN_OR_RETURN(UniqueFd fd,
                         OpenFile(name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK));
    SDP_ASSIGN_OR_RETURN(uint64_t bytes, RegularFileBytes(fd.get(), name));
    if (bytes == entry.bytes) continue;
    return absl::DataLossError(absl::StrCat(
        name, ": has ", bytes, " bytes, the manifest says ", entry.bytes,
        "; the file is damaged, take another checkpoint"));
  }
  return manifest;
}

absl::StatusOr<uint32_t> ChecksumOf(
    int fd, uint64_t file_bytes, absl::string_view name,
    const std::function<void(uint64_t)>& progress) {
  std::string piece(std::min(file_bytes, kPieceBytes), '\0');
  uint32_t crc = 0;
  for (uint64_t at = 0; at < file_bytes;) {
    const size_t bytes = std::min<uint64_t>(file_bytes - at, piece.size());
    SDP_RETURN_IF_ERROR(PreadFully(fd, piece.data(), bytes, at, name));
    crc = Crc32c(crc, piece.data(), bytes);
    at += bytes;
    if (progress) progress(bytes);
  }
  return crc;
}

absl::Status CheckChecksum(const std::string& path, const FileEntry& entry,
                           const std::function<void(uint64_t)>& progress) {
  const std::string name = Join(path, entry.name);
  SDP_ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(name, O_RDONLY | O_NOFOLLOW));
  SDP_ASSIGN_OR_RETURN(const uint32_t crc,
                       ChecksumOf(fd.get(), entry.bytes, name, progress));
  if (crc == entry.crc32c) return absl::OkStatus();
  return absl::DataLossError(absl::StrFormat(
      "%s: checksum %08x, the manifest says %08x; the file is damaged, take "
      "another checkpoint",
      name, crc, entry.crc32c));
}

}  // namespace slidedp::checkpoint
