// The files of a checkpoint cut into pieces that threads read or write in a
// given order of units; and the checksum of each file from those of its pieces.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "common/base/units.h"
#include "common/checkpoint/files.h"
#include "hostd/store/host_state.h"

namespace slidedp::hostd {

// Large enough for disks, small enough that several threads share a unit.
inline constexpr uint64_t kFilePieceBytes = 8 * kMiB;

struct FilePiece {
  size_t file;                                           // of the files
  const checkpoint::Extent* extent;                      // that it lies in
  uint64_t begin, bytes;                                 // in the file
  uint64_t at() const { return begin - extent->begin; }  // in the extent
};

class FilePieces {
 public:
  // `files` is borrowed. Pieces of the planes come by `unit_order`, each file's
  // ascending; then all others.
  FilePieces(const std::vector<checkpoint::File>& files,
             const std::vector<int>& unit_order,
             uint64_t piece_bytes = kFilePieceBytes);

  const std::vector<FilePiece>& pieces() const { return pieces_; }
  uint64_t total_bytes() const { return total_bytes_; }
  // How many pieces hold planes of the unit.
  uint64_t pieces_of(int unit) const { return pieces_of_[unit]; }

  // Calls `work` on every piece, in that order, from `threads` at once (numbers
  // 0 to threads - 1); `scratch` has room for a piece, `*crc` is for its
  // checksum.
  // Returns the first error seen; Cancelled soon after `stop` becomes true.
  using Work = std::function<absl::Status(const FilePiece& piece, int thread,
                                          char* scratch, uint32_t* crc)>;
  absl::Status ForEach(int threads, const std::atomic<bool>* stop,
                       const Work& work);
  // After ForEach without an error: checksum of each file.
  std::vector<uint32_t> FileChecksums() const;

 private:
  const std::vector<checkpoint::File>& files_;
  std::vector<FilePiece> pieces_;
  std::vector<uint32_t> crcs_;  // of the pieces
  std::vector<uint64_t> pieces_of_;
  uint64_t total_bytes_ = 0;
};

// Where a piece of the planes lies in memory.
char* PlaneBytes(const HostState& state, const FilePiece& piece);

}  // namespace slidedp::hostd
