// float32 to IEEE binary16, nearest, ties to even. An oracle and a writer of
// test files; not fast.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace slidedp::testing {

inline uint16_t FloatToHalf(float x) {
  uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return sign | 0x7e00;
  double magnitude = std::fabs(static_cast<double>(x));
  if (magnitude >= 65520) return sign | 0x7c00;
  int exponent = magnitude == 0 ? -14 : std::max(std::ilogb(magnitude), -14);
  // In units of the last place; nearbyint rounds ties to even.
  double units = std::nearbyint(std::ldexp(magnitude, 10 - exponent));
  // 2048 units carry into the next exponent by themselves.
  int bits = (exponent + 14) * 1024 + static_cast<int>(units);
  return static_cast<uint16_t>(sign | bits);
}

}  // namespace slidedp::testing
