#include "hostd/ctl/export_model.h"

#include <algorithm>
#include <map>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/checkpoint/open.h"
#include "common/model/copy_files.h"
#include "common/model/output.h"
#include "common/model/temporary_folder.h"
#include "hostd/ctl/byte_progress.h"
#include "hostd/ctl/resolve.h"
#include "hostd/store/half.h"
#include "hostd/store/split.h"
#include "nlohmann/json.hpp"

namespace slidedp::ctl {
namespace {

using checkpoint::OpenCheckpoint;
using model::DType;
using model::TensorEntry;

constexpr uint64_t kPieceElements = uint64_t{1} << 18;
constexpr char kIndexFile[] = "model.safetensors.index.json";
constexpr char kConfigFile[] = "config.json";

struct Trained {
  int unit;
  const model::Tensor* tensor;
};

class Exporter {
 public:
  Exporter(const OpenCheckpoint& from, bool float32, const Interrupt* interrupt,
           ByteProgress& progress, DiskCalls& calls)
      : from_(from),
        float32_(float32),
        interrupt_(interrupt),
        progress_(progress),
        calls_(calls) {
    const model::StateLayout& layout = from.layout();
    for (size_t u = 0; u < layout.units.size(); ++u) {
      for (const model::Tensor& tensor : layout.units[u].tensors) {
        trained_[tensor.name] = {static_cast<int>(u), &tensor};
      }
    }
    if (layout.tied()) {
      trained_[model::kHeadName] = {
          layout.embedding_unit(),
          &layout.units[layout.embedding_unit()].tensor(
              model::Role::kEmbedding)};
    }
  }

  absl::Status Write(const model::SourceFile& file,
                     model::TemporaryFolder& to) {
    std::vector<TensorEntry> entries = file.header.tensors;
    for (TensorEntry& entry : entries) {
      if (trained_.contains(entry.name)) entry.dtype = DTypeOf(entry.name);
    }
    const std::string header =
        model::EncodeSafetensorsHeader(entries, file.header.metadata);
    const std::string path = absl::StrCat(to.path(), "/", file.name);
    SDP_ASSIGN_OR_RETURN(UniqueFd fd, calls_.Create(to.fd(), file.name, path));
    SDP_RETURN_IF_ERROR(
        calls_.Write(fd.get(), header.data(), header.size(), 0, path));
    for (size_t i = 0; i < entries.size(); ++i) {
      auto it = trained_.find(entries[i].name);
      SDP_RETURN_IF_ERROR(
          it == trained_.end()
              ? CopyTensor(file, file.header.tensors[i], entries[i], fd.get(),
                           path)
              : WriteTensor(it->second, entries[i], fd.get(), path));
    }
    return calls_.Sync(fd.get(), path);
  }

 private:
  absl::Status Written(uint64_t bytes) {
    progress_.Add(bytes);
    return interrupt_ != nullptr && interrupt_->raised()
               ? absl::CancelledError("interrupted")
               : absl::OkStatus();
  }
  DType DTypeOf(const std::string& name) const {
    if (float32_) return DType::kF32;
    const auto& others = from_.manifest().source_dtypes;
    // The tied head's is its table's.
    auto it = others.find(name == model::kHeadName && from_.layout().tied()
                              ? trained_.at(name).tensor->name
                              : name);
    if (it == others.end()) return DType::kBf16;
    return it->second == "F16" ? DType::kF16 : DType::kF32;
  }

  absl::Status CopyTensor(const model::SourceFile& file,
                          const TensorEntry& from, const TensorEntry& to,
                          int fd, const std::string& path) {
    std::string piece(std::min(kMiB, from.end - from.begin), '\0');
    for (uint64_t at = 0; at < from.end - from.begin;) {
      const size_t bytes =
          std::min<uint64_t>(piece.size(), from.end - from.begin - at);
      SDP_RETURN_IF_ERROR(PreadFully(file.fd.get(), piece.data(), bytes,
                                     from.begin + at, file.name));
      SDP_RETURN_IF_ERROR(
          calls_.Write(fd, piece.data(), bytes, to.begin + at, path));
      at += bytes;
      SDP_RETURN_IF_ERROR(Written(bytes));
    }
    return absl::OkStatus();
  }

  absl::Status WriteTensor(const Trained& trained, const TensorEntry& entry,
                           int fd, const std::string& path) {
    const uint64_t total = trained.tensor->count;
    const uint64_t room = std::min(total, kPieceElements);
    std::vector<bf16> hi(room);
    std::vector<int16_t> lo(room);
    std::vector<float> floats(room);
    std::vector<uint16_t> halves(room);
    for (uint64_t first = 0; first < total; first += room) {
      const uint64_t count = std::min(room, total - first);
      SDP_RETURN_IF_ERROR(
          from_.ReadHi(*trained.tensor, first, count, hi.data()));
      const void* bytes = hi.data();
      if (entry.dtype != DType::kBf16) {
        SDP_RETURN_IF_ERROR(from_.ReadState(checkpoint::Plane::kLo,
                                            trained.unit, *trained.tensor,
                                            first, count, lo.data()));
        for (uint64_t i = 0; i < count; ++i) {
          floats[i] = hostd::JoinFloat(hi[i], lo[i]);
        }
        bytes = floats.data();
      }
      if (entry.dtype == DType::kF16) {
        bool saturated = false;
        for (uint64_t i = 0; i < count; ++i) {
          halves[i] = hostd::FloatToHalfSaturated(floats[i], saturated);
        }
        bytes = halves.data();
      }
      const uint64_t element_bytes = model::DTypeBytes(entry.dtype);
      SDP_RETURN_IF_ERROR(calls_.Write(fd, bytes, count * element_bytes,
                                       entry.begin + first * element_bytes,
                                       path));
      SDP_RETURN_IF_ERROR(Written(count * sizeof(bf16)));
    }
    return absl::OkStatus();
  }

  const OpenCheckpoint& from_;
  const bool float32_;
  const Interrupt* const interrupt_;
  ByteProgress& progress_;
  DiskCalls& calls_;
  std::map<std::string, Trained> trained_;
};

// transformers would round what it loads to the dtype that config.json names.
absl::Status NameFloat32(const model::TemporaryFolder& folder,
                         DiskCalls& calls) {
  const std::string path = absl::StrCat(folder.path(), "/", kConfigFile);
  SDP_ASSIGN_OR_RETURN(const std::string text,
                       ReadFile(path, kMaxModelConfigBytes));
  auto config = nlohmann::ordered_json::parse(text, nullptr, false);
  if (!config.is_object()) {
    return InvalidInput(path, "", "", "not a JSON object", "");
  }
  for (const char* key : {"dtype", "torch_dtype"}) {
    if (config.contains(key)) config[key] = "float32";
  }
  SDP_RETURN_IF_ERROR(calls.Unlink(folder.fd(), kConfigFile, path));
  return calls.WriteNew(folder.fd(), kConfigFile, config.dump(2) + "\n", path);
}

}  // namespace

absl::Status ExportModel(const Environment& environment,
                         const std::string& checkpoint_path,
                         const std::string& to, bool float32,
                         DiskCalls& calls) {
  SDP_RETURN_IF_ERROR(model::CheckOutputPath(to));
  SDP_ASSIGN_OR_RETURN(const OpenCheckpoint from,
                       OpenCheckpoint::Open(checkpoint_path));
  uint64_t total_bytes = 0;
  for (const model::SourceFile& file : from.weights().files()) {
    total_bytes += file.header.file_bytes;
  }
  // The same name for every process: what a killed one left is replaced.
  SDP_ASSIGN_OR_RETURN(model::TemporaryFolder folder,
                       model::TemporaryFolder::Create(to, "export", calls));
  SDP_RETURN_IF_ERROR(model::CheckSpace(
      folder.path(), float32 ? 2 * total_bytes : total_bytes, "the export"));
  SDP_RETURN_IF_ERROR(model::CopyCompanions(checkpoint_path, folder.fd(),
                                            folder.path(), calls));
  if (float32) SDP_RETURN_IF_ERROR(NameFloat32(folder, calls));
  {
    ByteProgress progress(environment, "export", total_bytes);
    Exporter exporter(from, float32, environment.interrupt, progress, calls);
    for (const model::SourceFile& file : from.weights().files()) {
      SDP_RETURN_IF_ERROR(exporter.Write(file, folder));
    }
  }
  if (from.manifest().Find(kIndexFile) != nullptr) {
    SDP_ASSIGN_OR_RETURN(
        const std::string index,
        ReadFile(absl::StrCat(checkpoint_path, "/", kIndexFile), 64 * kMiB));
    SDP_RETURN_IF_ERROR(
        calls.WriteNew(folder.fd(), kIndexFile, index,
                       absl::StrCat(folder.path(), "/", kIndexFile)));
  }
  return folder.Commit();
}

}  // namespace slidedp::ctl
