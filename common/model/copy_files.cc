#include "common/model/copy_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/base/fd.h"
#include "common/base/status.h"
#include "common/base/units.h"

namespace slidedp::model {
namespace {

struct CloseFolder {
  void operator()(DIR* folder) const { closedir(folder); }
};

absl::StatusOr<std::vector<std::string>> CompanionsIn(
    const std::string& folder) {
  std::unique_ptr<DIR, CloseFolder> stream(opendir(folder.c_str()));
  if (stream == nullptr) {
    return ErrnoStatus(errno, absl::StrCat(folder, ": open folder"));
  }
  std::vector<std::string> names;
  while (true) {
    errno = 0;
    const dirent* entry = readdir(stream.get());
    if (entry == nullptr) break;
    if (IsCompanionFile(entry->d_name)) names.emplace_back(entry->d_name);
  }
  if (errno != 0) {
    return ErrnoStatus(errno, absl::StrCat(folder, ": read folder"));
  }
  std::sort(names.begin(), names.end());
  return names;
}

absl::Status CopyOne(const std::string& from_path, int to_fd,
                     const std::string& name, const std::string& to_path,
                     DiskCalls& calls) {
  SDP_ASSIGN_OR_RETURN(UniqueFd from,
                       OpenFile(from_path, O_RDONLY | O_NONBLOCK));
  SDP_ASSIGN_OR_RETURN(uint64_t bytes, RegularFileBytes(from.get(), from_path));
  SDP_ASSIGN_OR_RETURN(const UniqueFd to, calls.Create(to_fd, name, to_path));
  SDP_RETURN_IF_ERROR(
      CopyRange(from.get(), to.get(), 0, bytes, to_path, calls));
  return calls.Sync(to.get(), to_path);
}

}  // namespace

bool IsCompanionFile(absl::string_view name) {
  std::string lower = absl::AsciiStrToLower(name);
  for (absl::string_view suffix :
       {".bin", ".pth", ".pt", ".gguf", ".safetensors"}) {
    if (absl::EndsWith(lower, suffix)) return false;
  }
  if (absl::StartsWith(lower, "consolidated")) return false;
  for (absl::string_view whole :
       {"config.json", "generation_config.json", "special_tokens_map.json",
        "added_tokens.json", "merges.txt", "preprocessor_config.json",
        "processor_config.json"}) {
    if (name == whole) return true;
  }
  for (absl::string_view prefix : {"tokenizer", "vocab.", "chat_template."}) {
    if (absl::StartsWith(name, prefix)) return true;
  }
  // Spelled in either case, and in British English.
  for (absl::string_view prefix : {"license", "licence", "notice"}) {
    if (absl::StartsWith(lower, prefix)) return true;
  }
  return false;
}

absl::Status CopyRange(int from, int to, uint64_t begin, uint64_t end,
                       const std::string& name, DiskCalls& calls) {
  std::vector<char> buffer(std::min(end - begin, kMiB));
  for (uint64_t at = begin; at < end;) {
    size_t bytes = std::min<uint64_t>(end - at, buffer.size());
    SDP_RETURN_IF_ERROR(PreadFully(from, buffer.data(), bytes, at, name));
    SDP_RETURN_IF_ERROR(calls.Write(to, buffer.data(), bytes, at, name));
    at += bytes;
  }
  return absl::OkStatus();
}

absl::Status CopyCompanions(const std::string& source_folder, int to_fd,
                            const std::string& to_name, DiskCalls& calls) {
  SDP_ASSIGN_OR_RETURN(std::vector<std::string> names,
                       CompanionsIn(source_folder));
  bool has_config = false;
  for (const std::string& name : names) {
    std::string from_path = absl::StrCat(source_folder, "/", name);
    struct stat info;
    // Dangling links, folders and devices are not the model's files.
    if (stat(from_path.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) continue;
    SDP_RETURN_IF_ERROR(CopyOne(from_path, to_fd, name,
                                absl::StrCat(to_name, "/", name), calls));
    has_config |= name == "config.json";
  }
  if (!has_config) {
    return InvalidInput(source_folder, "config.json", "", "missing",
                        "the model folder has changed since it was read");
  }
  return absl::OkStatus();
}

}  // namespace slidedp::model
