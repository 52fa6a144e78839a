#include "common/checkpoint/files.h"

#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/check.h"
#include "common/base/status.h"

namespace slidedp::checkpoint {
namespace {

using model::DType;
using model::TensorEntry;

struct Trained {
  int unit;
  const model::Tensor* tensor;
  bool twice;
};
using TrainedByName = absl::flat_hash_map<std::string, Trained>;

File Begin(std::string name, std::string header) {
  File file;
  file.name = std::move(name);
  file.extents.push_back({Extent::From::kHeader, 0, header.size()});
  file.header = std::move(header);
  return file;
}

void End(File& file) {
  for (const Extent& extent : file.extents) {
    SDP_CHECK(extent.begin == file.bytes, "a hole in a checkpoint's file");
    file.bytes += extent.bytes;
  }
}

File ModelFile(const TrainedByName& trained, const model::TensorSource& source,
               size_t index) {
  const model::SourceFile& from = source.files()[index];
  std::vector<TensorEntry> entries = from.header.tensors;
  for (TensorEntry& entry : entries) {
    if (trained.contains(entry.name)) entry.dtype = DType::kBf16;
  }
  std::string header =
      model::EncodeSafetensorsHeader(entries, from.header.metadata);
  File file = Begin(from.name, std::move(header));
  for (size_t i = 0; i < entries.size(); ++i) {
    const TensorEntry& entry = entries[i];
    if (entry.begin == entry.end) continue;
    Extent extent{Extent::From::kSource, entry.begin, entry.end - entry.begin};
    if (auto it = trained.find(entry.name); it != trained.end()) {
      extent.from = Extent::From::kPlane;
      extent.unit = it->second.unit;
      extent.first = it->second.tensor->offset;
      extent.twice = it->second.twice;
    } else {
      extent.source_file = index;
      extent.source_begin = from.header.tensors[i].begin;
    }
    file.extents.push_back(extent);
  }
  End(file);
  return file;
}

File StateFile(const model::StateLayout& layout, int unit) {
  const auto count = static_cast<int64_t>(layout.units[unit].count);
  constexpr std::pair<Plane, DType> kPlanes[] = {{Plane::kLo, DType::kI16},
                                                 {Plane::kM, DType::kF32},
                                                 {Plane::kV, DType::kF32}};
  std::vector<TensorEntry> entries = {{"lo", DType::kI16, {count}, 0, 0},
                                      {"m", DType::kF32, {count}, 0, 0},
                                      {"v", DType::kF32, {count}, 0, 0}};
  std::string header = model::EncodeSafetensorsHeader(
      entries, {{"format", "slidedp-state"}, {"unit", absl::StrCat(unit)}});
  File file = Begin(StateFileName(unit), std::move(header));
  for (size_t i = 0; i < entries.size(); ++i) {
    Extent extent{Extent::From::kPlane, entries[i].begin,
                  entries[i].end - entries[i].begin};
    extent.plane = kPlanes[i].first;
    extent.unit = unit;
    file.extents.push_back(extent);
  }
  End(file);
  return file;
}

}  // namespace

uint64_t ElementBytes(Plane plane) {
  return plane == Plane::kHi || plane == Plane::kLo ? 2 : 4;
}

std::string StateFileName(int unit) {
  return absl::StrFormat("state-%05d.safetensors", unit);
}

uint64_t PlanesHash(const model::StateLayout& layout) {
  model::StateLayout planes = layout;
  planes.frozen_parameters = 0;
  for (model::Unit& unit : planes.units) {
    for (model::Tensor& tensor : unit.tensors) {
      tensor.decay = tensor.frozen = false;
    }
  }
  return model::HashOf(planes);
}

absl::StatusOr<std::vector<File>> MakeFiles(const model::StateLayout& layout,
                                            const model::TensorSource& source) {
  TrainedByName trained;
  for (size_t u = 0; u < layout.units.size(); ++u) {
    for (const model::Tensor& tensor : layout.units[u].tensors) {
      const model::TensorSource::Ref ref = source.Find(tensor.name);
      if (ref.entry == nullptr || ref.entry->count() != tensor.count) {
        return absl::InvalidArgumentError(
            absl::StrCat(tensor.name,
                         ": in none of the model's files, or of "
                         "another size"));
      }
      trained[tensor.name] = {static_cast<int>(u), &tensor, false};
    }
  }
  if (layout.tied() && source.Find(model::kHeadName).entry != nullptr) {
    const model::Tensor& table =
        layout.units[layout.embedding_unit()].tensor(model::Role::kEmbedding);
    if (source.Find(model::kHeadName).entry->count() != table.count) {
      return absl::InvalidArgumentError(
          absl::StrCat(model::kHeadName, ": not of the embedding's size"));
    }
    trained[model::kHeadName] = {layout.embedding_unit(), &table, true};
  }
  std::vector<File> files;
  for (size_t i = 0; i < source.files().size(); ++i) {
    files.push_back(ModelFile(trained, source, i));
  }
  for (size_t u = 0; u < layout.units.size(); ++u) {
    files.push_back(StateFile(layout, static_cast<int>(u)));
  }
  return files;
}

}  // namespace slidedp::checkpoint
