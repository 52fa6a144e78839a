// The split planes lose nothing: over all 2^32 bit patterns.
#include "hostd/store/split.h"

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace slidedp::hostd {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kStride = 4099;  // prime: meets every low byte
#else
constexpr uint64_t kStride = 1;
#endif

// What bits of nearest-ties-away BF16 mean, said another way than SplitFloat:
// truncate, then step away from zero if the dropped half-word is half or more.
uint16_t NearestAway(uint32_t bits) {
  const uint32_t dropped = bits & 0xffffu;
  return static_cast<uint16_t>((bits >> 16) + (dropped >> 15));
}

// Whether x rounds to a finite bfloat16, said with arithmetic: the midpoint
// between the largest finite bfloat16 and the next power of two is the limit.
bool RoundsToFinite(float x) {
  const double limit = (double{0x1.fep127} + 0x1p128) / 2;
  return std::fabs(static_cast<double>(x)) < limit;  // false for NaN
}

// Patterns in [begin, end) that break a property.
uint64_t CountViolations(uint64_t begin, uint64_t end) {
  uint64_t violations = 0;
  for (uint64_t pattern = begin; pattern < end; pattern += kStride) {
    const uint32_t bits = static_cast<uint32_t>(pattern);
    const float x = std::bit_cast<float>(bits);
    bf16 hi;
    int16_t lo;
    SplitFloat(x, hi, lo);
    const bool splittable = Splittable(x);
    const bool exact = std::bit_cast<uint32_t>(JoinFloat(hi, lo)) == bits;
    const bool nearest = hi == NearestAway(bits);
    // Without wrapping: the rest is in [-32768, 32767], half of hi's last
    // place.
    const bool near = int64_t{bits} - (int64_t{hi} << 16) == int64_t{lo};
    const bool finite_hi = (hi & 0x7f80u) != 0x7f80u;
    violations += splittable != RoundsToFinite(x);
    if (splittable) violations += !(exact && nearest && near && finite_hi);
  }
  return violations;
}

TEST(SplitTest, EveryFiniteFloatIsExactAndItsHiIsNearestTiesAway) {
  constexpr uint64_t kPatterns = uint64_t{1} << 32;
  std::atomic<uint64_t> violations = 0;
  std::thread other(
      [&] { violations += CountViolations(kPatterns / 2, kPatterns); });
  violations += CountViolations(0, kPatterns / 2);
  other.join();
  EXPECT_EQ(violations.load(), 0u);
}

TEST(SplitTest, TiesGoAwayFromZero) {
  for (uint32_t sign : {0u, 0x80000000u}) {
    bf16 hi;
    int16_t lo;
    SplitFloat(std::bit_cast<float>(sign | 0x3f808000u), hi, lo);
    EXPECT_EQ(hi, (sign >> 16) | 0x3f81u);
    EXPECT_EQ(lo, -32768);
    SplitFloat(std::bit_cast<float>(sign | 0x3f807fffu), hi, lo);
    EXPECT_EQ(hi, (sign >> 16) | 0x3f80u);
    EXPECT_EQ(lo, 32767);
  }
}

TEST(SplitTest, TwoFloatsNeverShareOnePair) {
  // Neighbours of a tie, which rounding to even would merge.
  for (uint32_t bits : {0x3f807fffu, 0x3f808000u, 0x3f808001u, 0x3f817fffu,
                        0x3f818000u, 0x3f818001u}) {
    bf16 hi;
    int16_t lo;
    SplitFloat(std::bit_cast<float>(bits), hi, lo);
    EXPECT_EQ(std::bit_cast<uint32_t>(JoinFloat(hi, lo)), bits);
  }
}

TEST(SplitTest, RefusesWhatHasNoFiniteHi) {
  EXPECT_TRUE(Splittable(std::bit_cast<float>(0x7f7f7fffu)));
  EXPECT_TRUE(Splittable(std::bit_cast<float>(0xff7f7fffu)));
  EXPECT_TRUE(Splittable(0.0f));
  EXPECT_TRUE(Splittable(std::bit_cast<float>(1u)));
  for (uint32_t bits : {0x7f7f8000u, 0x7f7fffffu, 0x7f800000u, 0x7f800001u,
                        0x7fc00000u, 0x7fffffffu}) {
    EXPECT_FALSE(Splittable(std::bit_cast<float>(bits))) << std::hex << bits;
    EXPECT_FALSE(Splittable(std::bit_cast<float>(bits | 0x80000000u)))
        << std::hex << bits;
  }
}

}  // namespace
}  // namespace slidedp::hostd
