#include "hostd/checkpoint/writer.h"

#include <fcntl.h>

#include <cerrno>
#include <deque>

#include "absl/strings/str_cat.h"
#include "common/base/crc32c.h"
#include "common/base/status.h"
#include "hostd/checkpoint/file_pieces.h"

namespace slidedp::hostd {
namespace {

using checkpoint::Extent;

// Of each thread, on its way to the disk: with 4 threads, 128 MiB of dirty
// pages at most.
constexpr size_t kPiecesUnderWay = 4;

// Not every file system takes part in this; an error of the disk is one, and
// must not be lost, as the kernel tells it once only.
absl::Status SyncRange(int fd, const FilePiece& piece, unsigned flags,
                       const std::string& name) {
  if (sync_file_range(fd, static_cast<off_t>(piece.begin),
                      static_cast<off_t>(piece.bytes), flags) == 0 ||
      errno == EINVAL || errno == ESPIPE || errno == ENOSYS ||
      errno == EOPNOTSUPP) {
    return absl::OkStatus();
  }
  return ErrnoStatus(errno, absl::StrCat(name, ": write"));
}

// The pages of what a thread has written, kept few.
class Outflow {
 public:
  Outflow(const std::vector<checkpoint::File>& files,
          const std::vector<int>& fds)
      : files_(files), fds_(fds) {}

  absl::Status Add(const FilePiece& piece) {
    SDP_RETURN_IF_ERROR(SyncRange(fds_[piece.file], piece,
                                  SYNC_FILE_RANGE_WRITE,
                                  files_[piece.file].name));
    under_way_.push_back(&piece);
    return under_way_.size() > kPiecesUnderWay ? Finish() : absl::OkStatus();
  }
  absl::Status FinishAll() {
    while (!under_way_.empty()) SDP_RETURN_IF_ERROR(Finish());
    return absl::OkStatus();
  }

 private:
  absl::Status Finish() {
    const FilePiece& piece = *under_way_.front();
    under_way_.pop_front();
    const int fd = fds_[piece.file];
    SDP_RETURN_IF_ERROR(SyncRange(fd, piece,
                                  SYNC_FILE_RANGE_WAIT_BEFORE |
                                      SYNC_FILE_RANGE_WRITE |
                                      SYNC_FILE_RANGE_WAIT_AFTER,
                                  files_[piece.file].name));
    posix_fadvise(fd, static_cast<off_t>(piece.begin),
                  static_cast<off_t>(piece.bytes), POSIX_FADV_DONTNEED);
    return absl::OkStatus();
  }

  const std::vector<checkpoint::File>& files_;
  const std::vector<int>& fds_;
  std::deque<const FilePiece*> under_way_;
};

}  // namespace

std::vector<int> SaveOrder(const model::StateLayout& layout,
                           policy::UpdateMode mode) {
  const int units = static_cast<int>(layout.units.size());
  std::vector<int> order = {layout.embedding_unit()};
  for (int i = 1; i < units; ++i) {
    order.push_back(mode == policy::UpdateMode::kDeferred ? i : units - i);
  }
  return order;
}

absl::StatusOr<std::vector<uint32_t>> WriteCheckpoint(
    const std::vector<checkpoint::File>& files,
    const model::TensorSource& source, const HostState& state,
    const std::vector<int>& fds, const WriteOptions& options) {
  FilePieces pieces(files, options.unit_order);
  std::vector<std::atomic<uint64_t>> left(options.unit_order.size());
  for (size_t u = 0; u < left.size(); ++u) {
    left[u] = pieces.pieces_of(static_cast<int>(u));
  }
  std::vector<Outflow> outflows(options.threads, Outflow(files, fds));
  const auto write = [&](const FilePiece& piece, int thread, char* scratch,
                         uint32_t* crc) -> absl::Status {
    const Extent& extent = *piece.extent;
    const checkpoint::File& file = files[piece.file];
    const char* bytes = scratch;
    switch (extent.from) {
      case Extent::From::kHeader:
        bytes = file.header.data() + piece.at();
        break;
      case Extent::From::kPlane:
        bytes = PlaneBytes(state, piece);
        break;
      case Extent::From::kSource: {
        const model::SourceFile& from = source.files()[extent.source_file];
        SDP_RETURN_IF_ERROR(PreadFully(from.fd.get(), scratch, piece.bytes,
                                       extent.source_begin + piece.at(),
                                       from.name));
        break;
      }
    }
    *crc = Crc32c(0, bytes, piece.bytes);
    SDP_RETURN_IF_ERROR(options.calls->Write(
        fds[piece.file], bytes, piece.bytes, piece.begin, file.name));
    if (options.written_bytes != nullptr) {
      *options.written_bytes += piece.bytes;
    }
    // The bytes are the kernel's now.
    if (extent.from == Extent::From::kPlane && --left[extent.unit] == 0) {
      options.unit_saved(extent.unit);
    }
    return outflows[thread].Add(piece);
  };
  SDP_RETURN_IF_ERROR(pieces.ForEach(options.threads, options.stop, write));
  for (Outflow& outflow : outflows) SDP_RETURN_IF_ERROR(outflow.FinishAll());
  return pieces.FileChecksums();
}

}  // namespace slidedp::hostd
