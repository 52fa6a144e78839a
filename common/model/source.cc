#include "common/model/source.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/base/bf16.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/model/half.h"
#include "common/model/strict_json.h"

namespace slidedp::model {
namespace {

using nlohmann::json;

constexpr char kSingleFile[] = "model.safetensors";
constexpr char kIndexFile[] = "model.safetensors.index.json";
constexpr uint64_t kMaxIndexBytes = 64 * kMiB;
constexpr int kMaxIndexDepth = 8;
constexpr size_t kMaxShards = 10000;

bool IsPlainShardName(absl::string_view name) {
  return absl::EndsWith(name, ".safetensors") && name.front() != '.' &&
         !absl::StrContains(name, '/') && !absl::StrContains(name, '\0') &&
         name.size() <= 255;
}

// name -> file
absl::StatusOr<std::map<std::string, std::string>> ReadIndex(
    const std::string& path) {
  SDP_ASSIGN_OR_RETURN(std::string text, ReadFile(path, kMaxIndexBytes));
  SDP_ASSIGN_OR_RETURN(json index, ParseStrictJson(text, path, kMaxIndexDepth));
  if (!index.is_object() || !index.contains("weight_map") ||
      !index["weight_map"].is_object()) {
    return InvalidInput(path, "weight_map", "", "must be an object",
                        "it maps tensor names to shard names");
  }
  std::map<std::string, std::string> map;
  std::set<std::string> shards;
  for (const auto& [name, file] : index["weight_map"].items()) {
    if (!file.is_string() ||
        !IsPlainShardName(file.get_ref<const std::string&>())) {
      return InvalidInput(path, absl::StrCat("weight_map.", Printable(name)),
                          Describe(file), "not a plain shard name",
                          "must be like model-00001-of-00002.safetensors");
    }
    map[name] = file.get<std::string>();
    shards.insert(map[name]);
  }
  if (map.empty() || shards.size() > kMaxShards) {
    return InvalidInput(path, "weight_map", "",
                        absl::StrCat("names ", shards.size(), " shards"),
                        absl::StrCat("must name 1 to ", kMaxShards));
  }
  return map;
}

absl::StatusOr<UniqueFd> OpenShard(const std::string& path) {
  // O_NONBLOCK: a FIFO must not hang the open; regular files ignore it.
  SDP_ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(path, O_RDONLY | O_NONBLOCK));
  SDP_RETURN_IF_ERROR(RegularFileBytes(fd.get(), path).status());
  return fd;
}

bool Exists(const std::string& path) {
  struct stat info;
  return stat(path.c_str(), &info) == 0;
}

absl::StatusOr<TensorSource> OpenSharded(const std::string& folder) {
  std::string index_path = absl::StrCat(folder, "/", kIndexFile);
  SDP_ASSIGN_OR_RETURN(auto index, ReadIndex(index_path));
  std::set<std::string> shards;
  for (const auto& [name, file] : index) shards.insert(file);
  std::vector<std::pair<std::string, UniqueFd>> files;
  for (const std::string& shard : shards) {
    SDP_ASSIGN_OR_RETURN(UniqueFd fd,
                         OpenShard(absl::StrCat(folder, "/", shard)));
    files.emplace_back(shard, std::move(fd));
  }
  absl::StatusOr<TensorSource> source =
      TensorSource::FromFiles(std::move(files));
  if (!source.ok()) return Annotate(source.status(), folder);
  for (const auto& [name, file] : index) {
    TensorSource::Ref ref = source->Find(name);
    if (ref.entry == nullptr || ref.file->name != file) {
      return InvalidInput(
          index_path, absl::StrCat("weight_map.", Printable(name)), file,
          ref.entry == nullptr
              ? std::string("no shard holds this tensor")
              : absl::StrCat("the tensor is in ", ref.file->name),
          "the index and the shards are of different models");
    }
  }
  return source;
}

}  // namespace

absl::StatusOr<TensorSource> TensorSource::FromFiles(
    std::vector<std::pair<std::string, UniqueFd>> files) {
  TensorSource source;
  source.files_.reserve(files.size());
  for (auto& [name, fd] : files) {
    SDP_ASSIGN_OR_RETURN(SafetensorsHeader header,
                         ReadSafetensorsHeader(fd.get(), name));
    source.files_.push_back(
        SourceFile{std::move(name), std::move(fd), std::move(header)});
  }
  for (const SourceFile& file : source.files_) {
    for (const TensorEntry& entry : file.header.tensors) {
      auto [it, is_new] =
          source.by_name_.try_emplace(entry.name, Ref{&file, &entry});
      if (!is_new) {
        return InvalidInput(
            file.name, absl::StrCat("tensor ", Printable(entry.name)), "",
            absl::StrCat("also in ", it->second.file->name), "");
      }
    }
  }
  return source;
}

TensorSource::Ref TensorSource::Find(absl::string_view name) const {
  auto it = by_name_.find(name);
  return it == by_name_.end() ? Ref{nullptr, nullptr} : it->second;
}

absl::StatusOr<TensorSource> OpenModelFolder(const std::string& folder) {
  // As transformers does, one whole file goes before an index.
  std::string single = absl::StrCat(folder, "/", kSingleFile);
  if (Exists(single)) {
    SDP_ASSIGN_OR_RETURN(UniqueFd fd, OpenShard(single));
    std::vector<std::pair<std::string, UniqueFd>> files;
    files.emplace_back(kSingleFile, std::move(fd));
    absl::StatusOr<TensorSource> source =
        TensorSource::FromFiles(std::move(files));
    if (!source.ok()) return Annotate(source.status(), folder);
    return source;
  }
  if (Exists(absl::StrCat(folder, "/", kIndexFile))) {
    return OpenSharded(folder);
  }
  struct stat info;
  if (stat(folder.c_str(), &info) != 0) {
    return ErrnoStatus(errno, absl::StrCat(folder, ": model folder"));
  }
  if (!S_ISDIR(info.st_mode)) {
    return InvalidInput(folder, "", "", "not a folder",
                        "give the folder of a Hugging Face model");
  }
  bool pickled = Exists(absl::StrCat(folder, "/pytorch_model.bin")) ||
                 Exists(absl::StrCat(folder, "/pytorch_model.bin.index.json"));
  return InvalidInput(
      folder, "", "",
      absl::StrCat("neither ", kSingleFile, " nor ", kIndexFile, " is there"),
      pickled ? "convert the .bin files: save_pretrained(..., "
                "safe_serialization=True)"
              : "give the folder of a Hugging Face model, or train from "
                "random weights (random_weights_seed)");
}

absl::Status ReadAsFloat(const TensorSource::Ref& ref, uint64_t first,
                         uint64_t count, float* out) {
  const TensorEntry& entry = *ref.entry;
  uint64_t total = entry.count();
  if (first > total || count > total - first) {
    return absl::OutOfRangeError(
        absl::StrCat(ref.file->name, ": tensor ", Printable(entry.name),
                     ": elements ", first, " + ", count, " of ", total));
  }
  uint64_t begin = entry.begin + first * DTypeBytes(entry.dtype);
  int fd = ref.file->fd.get();
  if (entry.dtype == DType::kF32) {
    return PreadFully(fd, out, count * sizeof(float), begin, ref.file->name);
  }
  if (entry.dtype != DType::kBf16 && entry.dtype != DType::kF16) {
    return InvalidInput(ref.file->name,
                        absl::StrCat("tensor ", Printable(entry.name)),
                        DTypeName(entry.dtype), "unsupported dtype",
                        "must be BF16, F16 or F32");
  }
  // Small enough to stay in the second-level cache.
  constexpr uint64_t kPiece = 64 * 1024;
  std::vector<uint16_t> raw(std::min(count, kPiece));
  for (uint64_t done = 0; done < count;) {
    uint64_t n = std::min(count - done, kPiece);
    SDP_RETURN_IF_ERROR(PreadFully(fd, raw.data(), n * sizeof(uint16_t),
                                   begin + done * sizeof(uint16_t),
                                   ref.file->name));
    if (entry.dtype == DType::kBf16) {
      for (uint64_t i = 0; i < n; ++i) out[done + i] = Bf16ToFloat(raw[i]);
    } else {
      for (uint64_t i = 0; i < n; ++i) out[done + i] = HalfToFloat(raw[i]);
    }
    done += n;
  }
  return absl::OkStatus();
}

}  // namespace slidedp::model
