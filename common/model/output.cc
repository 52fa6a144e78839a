#include "common/model/output.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
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
#include "common/model/temporary_folder.h"

namespace slidedp::model {
namespace {

constexpr char kIndexFile[] = "model.safetensors.index.json";
constexpr uint64_t kMaxIndexBytes = 64 * kMiB;

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
  std::string target = parts.Join();
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
      return InvalidInput(folder_->path(), "shard", file.name,
                          "not a plain file name", "");
    }
    total_bytes += file.header.file_bytes;
  }
  SDP_RETURN_IF_ERROR(
      CheckSpace(folder_->path(), total_bytes, "the trained model"));
  for (const SourceFile& file : source.files()) {
    std::string path = absl::StrCat(folder_->path(), "/", file.name);
    SDP_ASSIGN_OR_RETURN(UniqueFd fd,
                         calls_.Create(folder_->fd(), file.name, path));
    SDP_RETURN_IF_ERROR(calls_.Reserve(fd.get(), file.header.file_bytes, path));
    SDP_RETURN_IF_ERROR(CopyRange(file.fd.get(), fd.get(), 0,
                                  file.header.data_begin, path, calls_));
    for (const TensorEntry& entry : file.header.tensors) {
      if (trained.contains(entry.name)) continue;
      SDP_RETURN_IF_ERROR(CopyRange(file.fd.get(), fd.get(), entry.begin,
                                    entry.end, path, calls_));
    }
    names_.push_back(path);
    files_.push_back(std::move(fd));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<OutputFolder>> OutputFolder::Create(
    const std::string& path, const std::string& source_folder,
    const TensorSource& source, const StateLayout& layout,
    const std::string& tag, DiskCalls& calls) {
  std::unique_ptr<OutputFolder> output(new OutputFolder(calls));
  SDP_RETURN_IF_ERROR(CheckOutputPath(path));
  bool single = source.files().size() == 1 &&
                source.files().front().name == "model.safetensors";
  if (!single) {
    SDP_ASSIGN_OR_RETURN(
        output->index_,
        ReadFile(absl::StrCat(source_folder, "/", kIndexFile), kMaxIndexBytes));
  }
  SDP_ASSIGN_OR_RETURN(TemporaryFolder folder,
                       TemporaryFolder::Create(path, tag, calls));
  output->folder_.emplace(std::move(folder));
  SDP_RETURN_IF_ERROR(CopyCompanions(source_folder, output->folder_->fd(),
                                     output->folder_->path(), calls));
  SDP_RETURN_IF_ERROR(output->LayOutShards(source, layout));
  return output;
}

absl::Status OutputFolder::Commit() {
  for (size_t i = 0; i < files_.size(); ++i) {
    SDP_RETURN_IF_ERROR(calls_.Sync(files_[i].get(), names_[i]));
  }
  if (!index_.empty()) {
    SDP_RETURN_IF_ERROR(
        calls_.WriteNew(folder_->fd(), kIndexFile, index_,
                        absl::StrCat(folder_->path(), "/", kIndexFile)));
  }
  return folder_->Commit();
}

}  // namespace slidedp::model
