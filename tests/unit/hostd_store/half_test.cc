// float32 to half: every half and both sides of every rounding limit.
#include "hostd/store/half.h"

#include <bit>
#include <cstdint>

#include "common/model/half.h"
#include "gtest/gtest.h"
#include "tests/testing/half.h"

namespace slidedp::hostd {
namespace {

TEST(HalfTest, EveryFiniteHalfComesBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    if ((bits & 0x7c00) == 0x7c00) continue;
    bool saturated = false;
    ASSERT_EQ(FloatToHalfSaturated(
                  model::HalfToFloat(static_cast<uint16_t>(bits)), saturated),
              bits);
    ASSERT_FALSE(saturated);
  }
}

TEST(HalfTest, RoundsToNearestEvenAndSaturates) {
  for (uint32_t bits = 0; bits < 0x7bff; ++bits) {
    const float low = model::HalfToFloat(static_cast<uint16_t>(bits));
    const float high = model::HalfToFloat(static_cast<uint16_t>(bits + 1));
    const float middle = low + (high - low) / 2;  // exact
    const uint32_t m = std::bit_cast<uint32_t>(middle);
    for (uint32_t x : {m - 1, m, m + 1}) {
      for (uint32_t sign : {0u, 0x80000000u}) {
        const float value = std::bit_cast<float>(x | sign);
        bool saturated = false;
        ASSERT_EQ(FloatToHalfSaturated(value, saturated),
                  testing::FloatToHalf(value))
            << value;
        ASSERT_FALSE(saturated);
      }
    }
  }
}

TEST(HalfTest, BeyondTheLargestHalfSaturatesAndSaysSo) {
  bool saturated = false;
  EXPECT_EQ(FloatToHalfSaturated(65519.996f, saturated), 0x7bff);
  EXPECT_FALSE(saturated);
  for (float x : {65520.0f, 1e30f, std::bit_cast<float>(0x7f7fffffu)}) {
    saturated = false;
    EXPECT_EQ(FloatToHalfSaturated(x, saturated), 0x7bff);
    EXPECT_TRUE(saturated);
    saturated = false;
    EXPECT_EQ(FloatToHalfSaturated(-x, saturated), 0xfbff);
    EXPECT_TRUE(saturated);
  }
}

}  // namespace
}  // namespace slidedp::hostd
