// The exchange segment: how CPU ranks meet. Private to shm_collective.
//
//   header line | per rank: one line of words | per rank: two staging buffers
//
// A rank's line and staging are written by that rank only, but for the slice
// of a reduction (see shm_collective.cc), which is disjoint. No locks: a rank
// that dies is one that doesn't arrive.
//
// Arrivals: each rank counts its arrivals up by one at fixed places of each
// operation. All ranks run the same operations, so arrival number k means the
// same place for all.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "common/base/units.h"

namespace slidedp::collective {

inline constexpr uint64_t kExchangeMagic = 0x534c444558434847;  // SLDEXCHG
inline constexpr uint64_t kExchangeLayoutVersion = 1;

// What every rank must agree on; the first rank to come writes each word and
// all compare.
struct alignas(kCacheLineBytes) ExchangeHeader {
  std::atomic<uint64_t> magic;
  std::atomic<uint64_t> layout_version;
  std::atomic<uint64_t> world_size;
  std::atomic<uint64_t> staging_bytes;
};
static_assert(sizeof(ExchangeHeader) == kCacheLineBytes);

struct OperationWords {
  std::atomic<uint64_t> what;  // kind, dtype, root
  std::atomic<uint64_t> count;
};

struct alignas(kCacheLineBytes) RankWords {
  std::atomic<uint64_t> arrivals;
  // What the rank believes it takes part in, stored before its first arrival;
  // by parity of the operation, because a rank can be one ahead of another.
  OperationWords operation[2];
};
static_assert(sizeof(RankWords) == kCacheLineBytes);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// Addresses within a region of ExchangeBytes().
class Exchange {
 public:
  Exchange(void* region, int world_size, size_t staging_bytes_per_rank);

  ExchangeHeader& header() const;
  RankWords& words(int rank) const;
  // Buffer 0 or 1 of the rank: piece k of all operations uses buffer k % 2, so
  // that a rank fills one while others still read the other.
  char* staging(int rank, uint64_t buffer) const;
  // Of one buffer: whole cache lines, at least one for each rank.
  size_t buffer_bytes() const { return buffer_bytes_; }

 private:
  char* region_;
  int world_size_;
  size_t buffer_bytes_;
};

}  // namespace slidedp::collective
