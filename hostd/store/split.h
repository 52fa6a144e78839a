// float32 <-> split planes (architecture section 3). Exact for every finite
// value whose hi does not round to infinity.
#pragma once

#include <bit>
#include <cstdint>

#include "common/base/bf16.h"

namespace slidedp::hostd {

inline void SplitFloat(float x, bf16& hi, int16_t& lo) {
  uint32_t bits = std::bit_cast<uint32_t>(x);
  hi = static_cast<bf16>((bits + 0x8000u) >> 16);
  lo = static_cast<int16_t>(bits - (static_cast<uint32_t>(hi) << 16));
}

inline float JoinFloat(bf16 hi, int16_t lo) {
  return std::bit_cast<float>((static_cast<uint32_t>(hi) << 16) +
                              static_cast<uint32_t>(static_cast<int32_t>(lo)));
}

// Whether x may enter the planes: finite, and hi finite.
inline bool Splittable(float x) {
  uint32_t magnitude = std::bit_cast<uint32_t>(x) & 0x7fffffffu;
  return magnitude + 0x8000u < 0x7f800000u;
}

// Whether these are the halves of a value that may enter the planes.
inline bool IsSplit(bf16 hi, int16_t lo) {
  const float x = JoinFloat(hi, lo);
  bf16 upper;
  int16_t lower;
  SplitFloat(x, upper, lower);
  return Splittable(x) && upper == hi && lower == lo;
}

}  // namespace slidedp::hostd
