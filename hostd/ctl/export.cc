// slidedpctl export: a checkpoint's model as a Hugging Face folder, without a
// daemon, but to find a job's checkpoint.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/checkpoint/open.h"
#include "common/model/copy_files.h"
#include "common/model/output.h"
#include "common/model/temporary_folder.h"
#include "hostd/ctl/byte_progress.h"
#include "hostd/ctl/commands.h"
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

// A job's id means its newest checkpoint.
absl::StatusOr<std::string> CheckpointOf(const Context& context,
                                         const std::string& from) {
  uint64_t id = 0;
  if (!absl::SimpleAtoi(from, &id)) {
    return AbsolutePath(from, context.environment.current_folder);
  }
  SDP_RETURN_IF_ERROR(context.socket_error);
  SDP_ASSIGN_OR_RETURN(const v1::GetReply reply,
                       ControlClient(context.socket).Get(id));
  const std::string& path = reply.info().progress().checkpoint_path();
  if (!path.empty()) return path;
  return absl::FailedPreconditionError(absl::StrCat(
      "job ", id, " has saved nothing yet; `slidedpctl checkpoint ", id,
      "` saves it"));
}

struct Trained {
  int unit;
  const model::Tensor* tensor;
};

class Exporter {
 public:
  Exporter(const OpenCheckpoint& from, bool float32, ByteProgress& progress)
      : from_(from), float32_(float32), progress_(progress) {
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
    SDP_ASSIGN_OR_RETURN(UniqueFd fd,
                         RealDiskCalls().Create(to.fd(), file.name, path));
    SDP_RETURN_IF_ERROR(
        PwriteFully(fd.get(), header.data(), header.size(), 0, path));
    for (size_t i = 0; i < entries.size(); ++i) {
      auto it = trained_.find(entries[i].name);
      SDP_RETURN_IF_ERROR(
          it == trained_.end()
              ? CopyTensor(file, file.header.tensors[i], entries[i], fd.get(),
                           path)
              : WriteTensor(it->second, entries[i], fd.get(), path));
    }
    return RealDiskCalls().Sync(fd.get(), path);
  }

 private:
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
          PwriteFully(fd, piece.data(), bytes, to.begin + at, path));
      at += bytes;
      progress_.Add(bytes);
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
      SDP_RETURN_IF_ERROR(PwriteFully(fd, bytes, count * element_bytes,
                                      entry.begin + first * element_bytes,
                                      path));
      progress_.Add(count * sizeof(bf16));
    }
    return absl::OkStatus();
  }

  const OpenCheckpoint& from_;
  const bool float32_;
  ByteProgress& progress_;
  std::map<std::string, Trained> trained_;
};

// transformers would round what it loads to the dtype that config.json names.
absl::Status NameFloat32(const std::string& path) {
  SDP_ASSIGN_OR_RETURN(const std::string text,
                       ReadFile(path, kMaxModelConfigBytes));
  auto config = nlohmann::ordered_json::parse(text, nullptr, false);
  if (!config.is_object()) {
    return InvalidInput(path, "", "", "not a JSON object", "");
  }
  for (const char* key : {"dtype", "torch_dtype"}) {
    if (config.contains(key)) config[key] = "float32";
  }
  return WriteFileAtomically(path, config.dump(2) + "\n");
}

absl::Status ExportTo(const Environment& environment,
                      const std::string& checkpoint_path, const std::string& to,
                      bool float32) {
  SDP_RETURN_IF_ERROR(model::CheckOutputPath(to));
  SDP_ASSIGN_OR_RETURN(const OpenCheckpoint from,
                       OpenCheckpoint::Open(checkpoint_path));
  uint64_t total_bytes = 0;
  for (const model::SourceFile& file : from.weights().files()) {
    total_bytes += file.header.file_bytes;
  }
  SDP_ASSIGN_OR_RETURN(
      model::TemporaryFolder folder,
      model::TemporaryFolder::Create(to, absl::StrCat("export-", getpid())));
  SDP_RETURN_IF_ERROR(model::CheckSpace(
      folder.path(), float32 ? 2 * total_bytes : total_bytes, "the export"));
  SDP_RETURN_IF_ERROR(
      model::CopyCompanions(checkpoint_path, folder.fd(), folder.path()));
  if (float32) {
    SDP_RETURN_IF_ERROR(
        NameFloat32(absl::StrCat(folder.path(), "/", kConfigFile)));
  }
  {
    ByteProgress progress(environment, "export", total_bytes);
    Exporter exporter(from, float32, progress);
    for (const model::SourceFile& file : from.weights().files()) {
      SDP_RETURN_IF_ERROR(exporter.Write(file, folder));
    }
  }
  if (from.manifest().Find(kIndexFile) != nullptr) {
    SDP_ASSIGN_OR_RETURN(
        const std::string index,
        ReadFile(absl::StrCat(checkpoint_path, "/", kIndexFile), 64 * kMiB));
    SDP_RETURN_IF_ERROR(WriteFileAtomically(
        absl::StrCat(folder.path(), "/", kIndexFile), index));
  }
  return folder.Commit();
}

}  // namespace

ExitCode Export(const Context& context, const ExportOptions& options) {
  const absl::StatusOr<std::string> from = CheckpointOf(context, options.from);
  if (!from.ok()) return context.FailCall(from.status());
  const std::string to =
      AbsolutePath(options.to, context.environment.current_folder);
  const absl::Status status =
      ExportTo(context.environment, *from, to, options.float32);
  if (!status.ok()) return context.Fail(kExitFailure, status.message());
  context.out() << to << "\n";
  return kExitOk;
}

}  // namespace slidedp::ctl
