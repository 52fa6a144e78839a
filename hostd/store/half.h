// float32 -> IEEE half bits, nearest even; what would become infinite becomes
// the largest finite half instead, and `saturated` is set.
#pragma once

#include <bit>
#include <cstdint>

namespace slidedp::hostd {

inline uint16_t FloatToHalfSaturated(float x, bool& saturated) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude >= 0x477ff000u) {  // 65520: the tie above 65504
    saturated = true;
    return sign | 0x7bffu;
  }
  if (magnitude < 0x38800000u) {  // below 2^-14: a subnormal half
    // The ulp of 0.5 is 2^-24, that of subnormal halves: the addition rounds.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return sign | static_cast<uint16_t>(std::bit_cast<uint32_t>(shifted) -
                                        0x3f000000u);
  }
  magnitude -= 112u << 23;  // exponent bias 127 -> 15
  return sign | static_cast<uint16_t>(
                    (magnitude + 0xfffu + ((magnitude >> 13) & 1u)) >> 13);
}

}  // namespace slidedp::hostd
