#include "hostd/checkpoint/reader.h"

#include <fcntl.h>

#include <algorithm>
#include <bit>
#include <numeric>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/crc32c.h"
#include "common/base/status.h"
#include "common/checkpoint/files.h"
#include "common/checkpoint/folder.h"
#include "common/model/source.h"
#include "hostd/checkpoint/file_pieces.h"
#include "hostd/store/pieces.h"
#include "hostd/store/split.h"

namespace slidedp::hostd {
namespace {

using checkpoint::Extent;
using checkpoint::FileEntry;
using checkpoint::Manifest;
using NamedFiles = std::vector<std::pair<std::string, UniqueFd>>;

constexpr char kRemedy[] = "take another checkpoint";

absl::Status Damaged(absl::string_view file, absl::string_view problem) {
  return absl::DataLossError(absl::StrCat(file, ": ", problem, "; ", kRemedy));
}

absl::StatusOr<Manifest> TakeManifest(NamedFiles& files) {
  for (auto it = files.begin(); it != files.end(); ++it) {
    if (it->first != checkpoint::kManifestFile) continue;
    SDP_ASSIGN_OR_RETURN(const uint64_t bytes,
                         RegularFileBytes(it->second.get(), it->first));
    if (bytes > checkpoint::kMaxManifestBytes) {
      return Damaged(it->first, "too long");
    }
    std::string text(bytes, '\0');
    SDP_RETURN_IF_ERROR(
        PreadFully(it->second.get(), text.data(), bytes, 0, it->first));
    files.erase(it);
    return checkpoint::ParseManifest(text, checkpoint::kManifestFile);
  }
  return absl::InvalidArgumentError("the checkpoint has no manifest.json");
}

// The files as they must be, and their descriptors in that order.
struct Opened {
  model::TensorSource weights;
  std::vector<checkpoint::File> files;
  std::vector<UniqueFd> states;
  std::vector<int> fds;
};

absl::Status CheckHeader(int fd, const checkpoint::File& file) {
  std::string header(file.header.size(), '\0');
  SDP_RETURN_IF_ERROR(
      PreadFully(fd, header.data(), header.size(), 0, file.name));
  if (header == file.header) return absl::OkStatus();
  return Damaged(file.name, "its header is not what its unit's must be");
}

absl::StatusOr<Opened> Open(NamedFiles files,
                            const model::StateLayout& layout) {
  absl::flat_hash_map<std::string, int> unit_of;
  for (size_t u = 0; u < layout.units.size(); ++u) {
    unit_of[checkpoint::StateFileName(static_cast<int>(u))] =
        static_cast<int>(u);
  }
  NamedFiles weights;
  std::vector<UniqueFd> states(layout.units.size());
  for (auto& [name, fd] : files) {
    if (auto it = unit_of.find(name); it != unit_of.end()) {
      states[it->second] = std::move(fd);
    } else {
      weights.emplace_back(std::move(name), std::move(fd));
    }
  }
  for (size_t u = 0; u < states.size(); ++u) {
    if (states[u].valid()) continue;
    return Damaged(checkpoint::StateFileName(static_cast<int>(u)), "missing");
  }
  SDP_ASSIGN_OR_RETURN(model::TensorSource source,
                       model::TensorSource::FromFiles(std::move(weights)));
  SDP_RETURN_IF_ERROR(model::ValidateSource(layout, source));
  SDP_ASSIGN_OR_RETURN(std::vector<checkpoint::File> wanted,
                       checkpoint::MakeFiles(layout, source));
  Opened opened{std::move(source), std::move(wanted), std::move(states), {}};
  for (const model::SourceFile& file : opened.weights.files()) {
    opened.fds.push_back(file.fd.get());
  }
  for (const UniqueFd& fd : opened.states) opened.fds.push_back(fd.get());
  for (size_t i = 0; i < opened.files.size(); ++i) {
    const checkpoint::File& file = opened.files[i];
    SDP_ASSIGN_OR_RETURN(const uint64_t bytes,
                         RegularFileBytes(opened.fds[i], file.name));
    // A trained tensor in another dtype than BF16 shows here, too.
    if (bytes != file.bytes) {
      return Damaged(file.name,
                     absl::StrCat("has ", bytes, " bytes, not ", file.bytes));
    }
    SDP_RETURN_IF_ERROR(CheckHeader(opened.fds[i], file));
  }
  return opened;
}

// Bytes that are not what the manifest says. Read when a file can't be
// understood: that it is damaged is then the better thing to say.
absl::Status FindDamaged(const Manifest& manifest, const NamedFiles& files) {
  for (const auto& [name, fd] : files) {
    const FileEntry* entry = manifest.Find(name);
    if (entry == nullptr) return Damaged(name, "not in the manifest");
    SDP_ASSIGN_OR_RETURN(const uint64_t bytes,
                         RegularFileBytes(fd.get(), name));
    if (bytes != entry->bytes) {
      return Damaged(name,
                     absl::StrCat("has ", bytes, " bytes, not ", entry->bytes));
    }
    SDP_ASSIGN_OR_RETURN(const uint32_t crc,
                         checkpoint::ChecksumOf(fd.get(), bytes, name));
    if (crc == entry->crc32c) continue;
    return Damaged(name,
                   absl::StrFormat("checksum %08x, the manifest says %08x", crc,
                                   entry->crc32c));
  }
  return absl::OkStatus();
}

NamedFiles Duplicate(const NamedFiles& files) {
  NamedFiles copies;
  for (const auto& [name, fd] : files) {
    copies.emplace_back(name, UniqueFd(fcntl(fd.get(), F_DUPFD_CLOEXEC, 0)));
  }
  return copies;
}

absl::Status CheckEntries(const Manifest& manifest, const Opened& opened,
                          const std::vector<uint32_t>& crcs) {
  for (size_t i = 0; i < opened.files.size(); ++i) {
    const checkpoint::File& file = opened.files[i];
    const FileEntry* entry = manifest.Find(file.name);
    if (entry == nullptr) return Damaged(file.name, "not in the manifest");
    if (entry->crc32c == crcs[i] && entry->bytes == file.bytes) continue;
    return Damaged(file.name,
                   absl::StrFormat("checksum %08x, the manifest says %08x",
                                   crcs[i], entry->crc32c));
  }
  return absl::OkStatus();
}

bool Finite(float x) {
  return (std::bit_cast<uint32_t>(x) & 0x7fffffffu) < 0x7f800000u;
}

// What AdamW can leave in the planes.
absl::Status CheckValues(const HostState& state, int threads,
                         const std::atomic<bool>* stop) {
  std::vector<PlacedTensor> tensors;
  for (size_t u = 0; u < state.layout().units.size(); ++u) {
    for (const model::Tensor& tensor : state.layout().units[u].tensors) {
      tensors.push_back({static_cast<int>(u), &tensor, {nullptr, nullptr}});
    }
  }
  return ForEachPiece(
      tensors, threads, stop,
      [&](size_t index, uint64_t first, uint64_t count, float*) {
        const PlacedTensor& placed = tensors[index];
        const PlaneSpan p =
            state.planes(placed.unit, placed.tensor->offset + first, count);
        bool good = true;
        for (uint64_t i = 0; i < count; ++i) {
          good &= IsSplit(p.hi[i], p.lo[i]) && Finite(p.m[i]) &&
                  Finite(p.v[i]) && p.v[i] >= 0;
        }
        return good ? absl::OkStatus()
                    : Damaged(checkpoint::StateFileName(placed.unit),
                              absl::StrCat(placed.tensor->name,
                                           ": a value that no update leaves"));
      });
}

}  // namespace

absl::StatusOr<Manifest> LoadCheckpoint(NamedFiles files, const ResumeJob& job,
                                        HostState& state,
                                        const std::atomic<bool>* stop,
                                        LoadProgress* progress) {
  const model::StateLayout& layout = state.layout();
  SDP_ASSIGN_OR_RETURN(Manifest manifest, TakeManifest(files));
  SDP_RETURN_IF_ERROR(checkpoint::CheckFits(manifest, checkpoint::kManifestFile,
                                            checkpoint::PlanesHash(layout),
                                            job.sampler, job.steps));
  const NamedFiles copies = Duplicate(files);
  const absl::StatusOr<Opened> understood = Open(std::move(files), layout);
  if (!understood.ok()) {
    SDP_RETURN_IF_ERROR(FindDamaged(manifest, copies));
    return understood.status();
  }
  const Opened& opened = *understood;
  std::vector<int> order(layout.units.size());
  std::iota(order.begin(), order.end(), 0);
  FilePieces pieces(opened.files, order);
  if (progress != nullptr) {
    progress->done_bytes = 0;
    progress->all_bytes = pieces.total_bytes();
  }
  const int threads = std::min(state.plan().update_threads, kMaxFileThreads);
  SDP_RETURN_IF_ERROR(pieces.ForEach(
      threads, stop,
      [&](const FilePiece& piece, int, char* scratch,
          uint32_t* crc) -> absl::Status {
        const bool plane =
            piece.extent->from == Extent::From::kPlane && !piece.extent->twice;
        const checkpoint::File& file = opened.files[piece.file];
        char* to = plane ? PlaneBytes(state, piece) : scratch;
        SDP_RETURN_IF_ERROR(PreadFully(opened.fds[piece.file], to, piece.bytes,
                                       piece.begin, file.name));
        *crc = Crc32c(0, to, piece.bytes);
        if (progress != nullptr) progress->done_bytes += piece.bytes;
        posix_fadvise(opened.fds[piece.file], static_cast<off_t>(piece.begin),
                      static_cast<off_t>(piece.bytes), POSIX_FADV_DONTNEED);
        return absl::OkStatus();
      }));
  SDP_RETURN_IF_ERROR(CheckEntries(manifest, opened, pieces.FileChecksums()));
  SDP_RETURN_IF_ERROR(CheckValues(state, threads, stop));
  return manifest;
}

}  // namespace slidedp::hostd
