#include "common/device/cuda_memory_map.h"

#include <algorithm>
#include <mutex>

#include "absl/strings/str_cat.h"

namespace slidedp::device {

absl::Status MemoryMap::Add(const MemoryRange& range) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  const auto next = ranges_.lower_bound(range.begin);
  const bool runs_into_next =
      next != ranges_.end() && next->second.begin < range.end;
  const bool within_previous =
      next != ranges_.begin() && std::prev(next)->second.end > range.begin;
  if (runs_into_next || within_previous) {
    return absl::InvalidArgumentError(
        absl::StrCat("the memory range of ", range.end - range.begin,
                     " bytes overlaps one that the device already knows"));
  }
  ranges_.emplace_hint(next, range.begin, range);
  return absl::OkStatus();
}

std::optional<MemoryRange> MemoryMap::Remove(const void* begin) {
  std::unique_lock<std::shared_mutex> lock(mutex_);
  auto node = ranges_.extract(reinterpret_cast<uintptr_t>(begin));
  if (node.empty()) return std::nullopt;
  return node.mapped();
}

std::optional<MemoryRange> MemoryMap::Find(const void* address) const {
  const auto at = reinterpret_cast<uintptr_t>(address);
  std::shared_lock<std::shared_mutex> lock(mutex_);
  auto after = ranges_.upper_bound(at);
  if (after == ranges_.begin()) return std::nullopt;
  const MemoryRange& range = std::prev(after)->second;
  if (at >= range.end) return std::nullopt;
  return range;
}

size_t MemoryMap::Contiguous(const void* address, size_t bytes) const {
  const std::optional<MemoryRange> range = Find(address);
  if (!range.has_value()) return bytes;
  return std::min(bytes, range->end - reinterpret_cast<uintptr_t>(address));
}

}  // namespace slidedp::device
