#include "worker/data/sampler.h"

#include <algorithm>
#include <map>

#include "gtest/gtest.h"

namespace slidedp::data {
namespace {

class SamplerSizesTest : public testing::TestWithParam<uint64_t> {};

TEST_P(SamplerSizesTest, EveryEpochHasEachSequenceOnce) {
  const uint64_t n = GetParam();
  for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, UINT64_MAX}) {
    const Sampler sampler(n, seed);
    for (const uint64_t epoch : {0, 1, 2, 1000000}) {
      std::vector<int> seen(n, 0);
      for (uint64_t i = 0; i < n; ++i) {
        const uint64_t sequence = sampler.At(epoch * n + i);
        ASSERT_LT(sequence, n);
        ++seen[sequence];
      }
      EXPECT_EQ(seen, std::vector<int>(n, 1)) << "epoch " << epoch;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, SamplerSizesTest,
                         testing::Values(1, 2, 3, 4, 5, 7, 16, 17, 100, 1000,
                                         4097));

std::vector<uint64_t> Order(const Sampler& sampler, uint64_t first,
                            uint64_t count) {
  std::vector<uint64_t> order;
  for (uint64_t i = 0; i < count; ++i) order.push_back(sampler.At(first + i));
  return order;
}

// A resumed job, and tests/references/job_data.py, rely on these.
TEST(SamplerTest, OrderIsTheSameInEveryRelease) {
  const std::pair<uint64_t, uint64_t> five[] = {{0, 3}, {1, 0}, {2, 2},
                                                {4, 4}, {5, 3}, {12, 1}};
  for (const auto& [position, sequence] : five) {
    EXPECT_EQ(Sampler(5, 0).At(position), sequence) << position;
  }
  const std::pair<uint64_t, uint64_t> many[] = {
      {0, 1170}, {1, 989}, {2, 360}, {1599, 616}, {1600, 1500}, {4000, 215}};
  for (const auto& [position, sequence] : many) {
    EXPECT_EQ(Sampler(1600, 42).At(position), sequence) << position;
  }
}

TEST(SamplerTest, PositionAloneDecides) {
  const Sampler a(1000, 7), b(1000, 7);
  const auto whole = Order(a, 0, 3000);
  for (uint64_t position : {2999, 0, 1234}) {
    EXPECT_EQ(b.At(position), whole[position]);
  }
}

TEST(SamplerTest, SeedsAndEpochsGiveDifferentOrders) {
  std::vector<std::vector<uint64_t>> orders;
  for (uint64_t seed = 0; seed < 5; ++seed) {
    const Sampler sampler(100, seed);
    for (uint64_t epoch = 0; epoch < 5; ++epoch) {
      orders.push_back(Order(sampler, epoch * 100, 100));
      EXPECT_FALSE(std::is_sorted(orders.back().begin(), orders.back().end()));
    }
  }
  std::sort(orders.begin(), orders.end());
  EXPECT_EQ(std::adjacent_find(orders.begin(), orders.end()), orders.end());
}

TEST(SamplerTest, EveryPlaceIsAboutEquallyLikely) {
  // 8000 (seed, epoch) pairs over 8 sequences: each is first 1000 times, give
  // or take 5 standard deviations (30 each).
  std::map<uint64_t, int> first, last;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    const Sampler sampler(8, seed);
    for (uint64_t epoch = 0; epoch < 4; ++epoch) {
      ++first[sampler.At(epoch * 8)];
      ++last[sampler.At(epoch * 8 + 7)];
    }
  }
  for (uint64_t i = 0; i < 8; ++i) {
    EXPECT_NEAR(first[i], 1000, 150) << i;
    EXPECT_NEAR(last[i], 1000, 150) << i;
  }
}

TEST(SamplerTest, NeighboursDoNotStayNeighbours) {
  const Sampler sampler(100000, 1);
  int close = 0;
  for (uint64_t i = 0; i + 1 < 100000; ++i) {
    const auto a = static_cast<int64_t>(sampler.At(i));
    const auto b = static_cast<int64_t>(sampler.At(i + 1));
    close += std::abs(a - b) <= 10;
  }
  // A random order has 20 such pairs, give or take 4.5 each.
  EXPECT_LT(close, 45);
}

TEST(SamplerTest, HugeDataSetsAreSampledAtOnce) {
  const uint64_t n = (uint64_t{1} << 62) - 3;
  const Sampler sampler(n, 5);
  for (uint64_t i = 0; i < 1000; ++i) ASSERT_LT(sampler.At(i), n);
}

}  // namespace
}  // namespace slidedp::data
