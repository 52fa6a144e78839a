#include "common/checkpoint/open.h"

#include <fcntl.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status.h"
#include "common/checkpoint/folder.h"

namespace slidedp::checkpoint {
namespace {

constexpr uint64_t kMaxConfigBytes = 1 << 20;

}  // namespace

absl::StatusOr<OpenCheckpoint> OpenCheckpoint::Open(const std::string& path) {
  SDP_ASSIGN_OR_RETURN(Manifest manifest, ReadManifest(path));
  const std::string config_file = absl::StrCat(path, "/config.json");
  SDP_ASSIGN_OR_RETURN(const std::string config,
                       ReadFile(config_file, kMaxConfigBytes));
  SDP_ASSIGN_OR_RETURN(const model::ModelConfig parsed,
                       model::ParseModelConfig(config, config_file));
  model::StateLayout layout = model::MakeStateLayout(parsed);
  if (PlanesHash(layout) != manifest.layout_hash) {
    return InvalidInput(absl::StrCat(path, "/", kManifestFile), "layout_hash",
                        absl::StrCat(manifest.layout_hash),
                        absl::StrCat("config.json gives ", PlanesHash(layout)),
                        "take another checkpoint; this one is mixed up");
  }
  SDP_ASSIGN_OR_RETURN(model::TensorSource weights,
                       model::OpenModelFolder(path));
  SDP_RETURN_IF_ERROR(model::ValidateSource(layout, weights));
  SDP_ASSIGN_OR_RETURN(std::vector<File> files, MakeFiles(layout, weights));
  OpenCheckpoint open(std::move(manifest), std::move(layout),
                      std::move(weights));
  for (const File& file : files) {
    const std::string name = absl::StrCat(path, "/", file.name);
    SDP_ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(name, O_RDONLY | O_NOFOLLOW));
    SDP_ASSIGN_OR_RETURN(const uint64_t bytes,
                         RegularFileBytes(fd.get(), name));
    std::string header(file.header.size(), '\0');
    if (bytes == file.bytes) {
      SDP_RETURN_IF_ERROR(
          PreadFully(fd.get(), header.data(), header.size(), 0, name));
    }
    if (bytes != file.bytes || header != file.header) {
      return absl::DataLossError(absl::StrCat(
          name,
          ": size or header are not those of this model's checkpoint; "
          "take another checkpoint"));
    }
  }
  const size_t units = open.layout_.units.size();
  for (size_t u = 0; u < units; ++u) {
    open.state_files_.push_back(std::move(files[files.size() - units + u]));
    SDP_ASSIGN_OR_RETURN(
        UniqueFd fd,
        OpenFile(absl::StrCat(path, "/", open.state_files_.back().name),
                 O_RDONLY | O_NOFOLLOW));
    open.states_.push_back(std::move(fd));
  }
  return open;
}

absl::Status OpenCheckpoint::ReadHi(const model::Tensor& tensor, uint64_t first,
                                    uint64_t count, bf16* out) const {
  const model::TensorSource::Ref ref = weights_.Find(tensor.name);
  return PreadFully(ref.file->fd.get(), out, count * sizeof(bf16),
                    ref.entry->begin + first * sizeof(bf16), ref.file->name);
}

absl::Status OpenCheckpoint::ReadState(Plane plane, int unit,
                                       const model::Tensor& tensor,
                                       uint64_t first, uint64_t count,
                                       void* out) const {
  const File& file = state_files_[unit];
  for (const Extent& extent : file.extents) {
    if (extent.from != Extent::From::kPlane || extent.plane != plane) continue;
    const uint64_t element_bytes = ElementBytes(plane);
    return PreadFully(states_[unit].get(), out, count * element_bytes,
                      extent.begin + (tensor.offset + first) * element_bytes,
                      file.name);
  }
  SDP_CHECK(false, "a plane that state files don't have");
}

}  // namespace slidedp::checkpoint
