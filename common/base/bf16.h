// bfloat16 bit conversions. Scalar; the vector forms are in hostd/update and
// worker/ops.
#pragma once

#include <bit>
#include <cstdint>

namespace slidedp {

using bf16 = uint16_t;  // bit pattern

inline float Bf16ToFloat(bf16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x) << 16);
}

// For code over values of either kind.
inline float ToFloat(bf16 x) { return Bf16ToFloat(x); }
inline float ToFloat(float x) { return x; }

// Nearest, ties to even: gradients. NaN stays NaN.
inline bf16 FloatToBf16Even(float x) {
  uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return static_cast<bf16>((bits >> 16) | 0x40u);
  }
  return static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Nearest, ties away from zero: the `hi` plane (architecture section 3).
inline bf16 FloatToBf16Away(float x) {
  return static_cast<bf16>((std::bit_cast<uint32_t>(x) + 0x8000u) >> 16);
}

}  // namespace slidedp
