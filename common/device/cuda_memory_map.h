// The memory that a CUDA device knows: its own allocations, pinned host memory,
// and host memory registered with it. Tells a copy where one piece ends and
// the next begins, and a word its address as the device sees it. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <shared_mutex>

#include "absl/status/status.h"

namespace slidedp::device {

struct MemoryRange {
  enum class Kind { kDevice, kPinned, kRegistered };
  uintptr_t begin = 0;  // in this process
  uintptr_t end = 0;
  uintptr_t device_begin = 0;  // as the device addresses it
  Kind kind = Kind::kDevice;
  bool read_only = false;

  bool host() const { return kind != Kind::kDevice; }
};

class MemoryMap {
 public:
  // InvalidArgument if it overlaps a range that is there.
  absl::Status Add(const MemoryRange& range);
  // The range that begins at `begin`; whoever removes it frees it.
  std::optional<MemoryRange> Remove(const void* begin);

  std::optional<MemoryRange> Find(const void* address) const;
  // Bytes from `address` that one copy may touch: to the end of its range, or
  // all of `bytes` if the address is in none.
  size_t Contiguous(const void* address, size_t bytes) const;

 private:
  mutable std::shared_mutex mutex_;
  std::map<uintptr_t, MemoryRange> ranges_;  // by begin; disjoint
};

}  // namespace slidedp::device
