#include "common/model/blank_source.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>
#include <vector>

#include "common/base/status.h"

namespace slidedp::model {

absl::StatusOr<TensorSource> BlankSource(const StateLayout& layout) {
  constexpr char kName[] = "model.safetensors";
  std::vector<TensorEntry> entries;
  for (const Unit& unit : layout.units) {
    for (const Tensor& tensor : unit.tensors) {
      entries.push_back({tensor.name, DType::kBf16, tensor.shape, 0, 0});
    }
  }
  const std::string header =
      EncodeSafetensorsHeader(entries, {{"format", "pt"}});
  UniqueFd fd(memfd_create(kName, MFD_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(errno, "memfd_create");
  SDP_RETURN_IF_ERROR(
      PwriteFully(fd.get(), header.data(), header.size(), 0, kName));
  if (ftruncate(fd.get(), static_cast<off_t>(entries.back().end)) != 0) {
    return ErrnoStatus(errno, "ftruncate");
  }
  std::vector<std::pair<std::string, UniqueFd>> files;
  files.emplace_back(kName, std::move(fd));
  return TensorSource::FromFiles(std::move(files));
}

}  // namespace slidedp::model
