#include "hostd/checkpoint/file_pieces.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>

#include "common/base/crc32c.h"

namespace slidedp::hostd {

using checkpoint::Extent;

FilePieces::FilePieces(const std::vector<checkpoint::File>& files,
                       const std::vector<int>& unit_order, uint64_t piece_bytes)
    : files_(files), pieces_of_(unit_order.size()) {
  std::vector<size_t> place(unit_order.size());
  for (size_t i = 0; i < unit_order.size(); ++i) place[unit_order[i]] = i;
  for (size_t f = 0; f < files.size(); ++f) {
    total_bytes_ += files[f].bytes;
    for (const Extent& extent : files[f].extents) {
      const uint64_t end = extent.begin + extent.bytes;
      for (uint64_t at = extent.begin; at < end; at += piece_bytes) {
        pieces_.push_back({f, &extent, at, std::min(piece_bytes, end - at)});
        if (extent.from == Extent::From::kPlane) ++pieces_of_[extent.unit];
      }
    }
  }
  const auto order = [&](const FilePiece& piece) {
    return piece.extent->from == Extent::From::kPlane
               ? place[piece.extent->unit]
               : place.size();
  };
  std::stable_sort(pieces_.begin(), pieces_.end(),
                   [&](const FilePiece& a, const FilePiece& b) {
                     return order(a) < order(b);
                   });
  crcs_.resize(pieces_.size());
}

absl::Status FilePieces::ForEach(int threads, const std::atomic<bool>* stop,
                                 const Work& work) {
  std::atomic<size_t> next = 0;
  std::atomic<bool> failed = false;
  std::mutex mutex;
  absl::Status failure;  // guarded by mutex
  uint64_t scratch_bytes = 0;
  for (const FilePiece& piece : pieces_) {
    scratch_bytes = std::max(scratch_bytes, piece.bytes);
  }
  auto run = [&](int thread) {
    const auto scratch = std::make_unique_for_overwrite<char[]>(scratch_bytes);
    for (size_t i = next++; i < pieces_.size() && !failed; i = next++) {
      const absl::Status status =
          stop != nullptr && *stop
              ? absl::CancelledError("told to stop")
              : work(pieces_[i], thread, scratch.get(), &crcs_[i]);
      if (status.ok()) continue;
      std::lock_guard lock(mutex);
      if (failure.ok()) failure = status;
      failed = true;
    }
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(run, i);
  run(0);
  for (std::thread& thread : others) thread.join();
  return failure;
}

std::vector<uint32_t> FilePieces::FileChecksums() const {
  std::vector<size_t> ascending(pieces_.size());
  std::iota(ascending.begin(), ascending.end(), 0);
  std::sort(ascending.begin(), ascending.end(), [&](size_t a, size_t b) {
    return pieces_[a].begin < pieces_[b].begin;
  });
  std::vector<uint32_t> crcs(files_.size(), 0);
  for (size_t i : ascending) {
    uint32_t& crc = crcs[pieces_[i].file];
    crc = Crc32cConcat(crc, crcs_[i], pieces_[i].bytes);
  }
  return crcs;
}

char* PlaneBytes(const HostState& state, const FilePiece& piece) {
  const Extent& extent = *piece.extent;
  const uint64_t element_bytes = checkpoint::ElementBytes(extent.plane);
  const PlaneSpan planes =
      state.planes(extent.unit, extent.first, extent.bytes / element_bytes);
  char* start = nullptr;
  switch (extent.plane) {
    case checkpoint::Plane::kHi:
      start = reinterpret_cast<char*>(planes.hi);
      break;
    case checkpoint::Plane::kLo:
      start = reinterpret_cast<char*>(planes.lo);
      break;
    case checkpoint::Plane::kM:
      start = reinterpret_cast<char*>(planes.m);
      break;
    case checkpoint::Plane::kV:
      start = reinterpret_cast<char*>(planes.v);
      break;
  }
  return start + piece.at();
}

}  // namespace slidedp::hostd
