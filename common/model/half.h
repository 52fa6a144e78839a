// IEEE binary16 to binary32. Exact.
#pragma once

#include <bit>
#include <cstdint>

namespace slidedp::model {

inline float HalfToFloat(uint16_t half) {
  uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  uint32_t exponent = (half >> 10) & 0x1fu;
  uint32_t fraction = half & 0x3ffu;
  if (exponent == 0) {
    // Zero or subnormal: fraction * 2^-24 is exact.
    float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  // 31: infinity and NaN keep their fraction bits.
  uint32_t wide = exponent == 31 ? 255 : exponent + 112;
  return std::bit_cast<float>(sign | (wide << 23) | (fraction << 13));
}

}  // namespace slidedp::model
