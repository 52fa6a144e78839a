// Byte units and integer arithmetic that layouts share.
#pragma once

#include <cstdint>
#include <string>

namespace slidedp {

inline constexpr uint64_t kKiB = uint64_t{1} << 10;
inline constexpr uint64_t kMiB = uint64_t{1} << 20;
inline constexpr uint64_t kGiB = uint64_t{1} << 30;
inline constexpr uint64_t kCacheLineBytes = 64;
inline constexpr uint64_t kPageBytes = 4096;

constexpr uint64_t CeilDiv(uint64_t a, uint64_t b) { return (a + b - 1) / b; }
constexpr uint64_t AlignUp(uint64_t a, uint64_t alignment) {
  return CeilDiv(a, alignment) * alignment;
}

// "1.50 GiB", "12 B".
std::string FormatBytes(uint64_t bytes);
// "3h12m", "4m05s", "12.3s".
std::string FormatSeconds(double seconds);

}  // namespace slidedp
