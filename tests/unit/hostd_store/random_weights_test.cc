#include "hostd/store/random_weights.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>
#include <vector>

#include "absl/strings/match.h"
#include "common/base/check.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "hostd/store/split.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/tiny_model.h"

namespace slidedp::hostd {
namespace {

constexpr uint64_t kSamples = 1 << 22;

std::vector<float> Normals(uint64_t seed, absl::string_view name,
                           uint64_t first, uint64_t count) {
  std::vector<float> values(count);
  RandomNormals(seed, name, first, count, values.data());
  return values;
}

double StandardNormalCdf(double x) { return 0.5 * std::erfc(-x / M_SQRT2); }

TEST(RandomNormalsTest, AreAFunctionOfSeedNameAndIndexOnly) {
  const std::vector<float> whole = Normals(7, "model.norm.weight", 0, 4099);
  const std::vector<float> part = Normals(7, "model.norm.weight", 1000, 99);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin() + 1000));
  EXPECT_NE(whole, Normals(8, "model.norm.weight", 0, 4099));
  EXPECT_NE(whole, Normals(7, "model.norm.weighs", 0, 4099));
}

// Pinned: another host or compiler must make the same model.
TEST(RandomNormalsTest, BitsDoNotChange) {
  const std::vector<float> values =
      Normals(1, "model.embed_tokens.weight", 123456789012, 4);
  std::vector<uint32_t> bits;
  for (float value : values) bits.push_back(std::bit_cast<uint32_t>(value));
  EXPECT_THAT(bits, ::testing::ElementsAre(1049561093u, 3156530345u,
                                           3214598915u, 3213813515u));
}

// The distance between empirical and normal distribution (Kolmogorov-Smirnov)
// is below 1.95 / sqrt(n) with probability 0.999; the seed is fixed.
TEST(RandomNormalsTest, AreStandardNormal) {
  std::vector<float> values = Normals(3, "x", 0, kSamples);
  std::sort(values.begin(), values.end());
  double distance = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double expected = StandardNormalCdf(values[i]);
    distance = std::max(
        {distance, std::abs(expected - static_cast<double>(i) / kSamples),
         std::abs(expected - static_cast<double>(i + 1) / kSamples)});
  }
  EXPECT_LT(distance, 1.95 / std::sqrt(static_cast<double>(kSamples)));
}

// What a sum of a few uniforms fails: 4 million values reach 4.9 deviations
// with probability 0.98, and their kurtosis is 3 within 5 standard errors.
TEST(RandomNormalsTest, TailsAreThoseOfANormalDistribution) {
  double sum = 0, squares = 0, fourths = 0, largest = 0;
  for (float value : Normals(5, "y", 0, kSamples)) {
    const double x = value;
    sum += x;
    squares += x * x;
    fourths += x * x * x * x;
    largest = std::max(largest, std::abs(x));
  }
  const double n = kSamples;
  EXPECT_NEAR(sum / n, 0, 5 / std::sqrt(n));
  EXPECT_NEAR(squares / n, 1, 5 * std::sqrt(2 / n));
  EXPECT_NEAR(fourths / n, 3, 5 * std::sqrt(96 / n));
  EXPECT_GT(largest, 4.8);
  EXPECT_LT(largest, 6.5);
}

TEST(RandomNormalsTest, NeighboursAreUncorrelated) {
  const std::vector<float> values = Normals(11, "z", 0, kSamples);
  for (size_t lag : {1, 2, 64, 4096}) {
    double product = 0;
    for (size_t i = lag; i < values.size(); ++i) {
      product += double{values[i]} * values[i - lag];
    }
    const auto n = static_cast<double>(values.size() - lag);
    EXPECT_NEAR(product / n, 0, 5 / std::sqrt(n)) << "lag " << lag;
  }
}

class FillRandomTest : public ::testing::Test {
 protected:
  static std::unique_ptr<HostState> Filled(uint64_t seed, int threads) {
    testing::TinyModelOptions options;
    options.family = model::Family::kQwen2;  // with biases
    options.vocab = 2051;                    // more than one piece
    policy::Plan plan;
    plan.h2d_chunk_bytes = plan.d2h_chunk_bytes = 8192;
    plan.ring_chunks = 3;
    auto state = HostState::Create(
        "j", model::MakeStateLayout(testing::TinyConfig(options)), plan);
    SDP_CHECK(state.ok(), state.status().message());
    const absl::Status status = FillRandomParameters(seed, threads, **state);
    SDP_CHECK(status.ok(), status.message());
    return *std::move(state);
  }

  static std::vector<float> Unit(const HostState& state, int unit) {
    const uint64_t count = state.layout().units[unit].count;
    const PlaneSpan planes = state.planes(unit, 0, count);
    std::vector<float> values;
    for (uint64_t i = 0; i < count; ++i) {
      values.push_back(JoinFloat(planes.hi[i], planes.lo[i]));
    }
    return values;
  }
};

TEST_F(FillRandomTest, ThreadsChangeNothing) {
  const auto one = Filled(4, 1);
  const auto many = Filled(4, 7);
  for (size_t u = 0; u < one->layout().units.size(); ++u) {
    EXPECT_EQ(Unit(*one, u), Unit(*many, u)) << "unit " << u;
  }
}

TEST_F(FillRandomTest, ValuesAreThoseOfTheTensorsAndPaddingIsZero) {
  const auto state = Filled(4, 3);
  for (size_t u = 0; u < state->layout().units.size(); ++u) {
    const model::Unit& unit = state->layout().units[u];
    const std::vector<float> values = Unit(*state, u);
    std::vector<float> expected(unit.count, 0.0f);
    for (const model::Tensor& tensor : unit.tensors) {
      float* out = expected.data() + tensor.offset;
      if (absl::StrContains(tensor.name, "norm")) {
        std::fill_n(out, tensor.count, 1.0f);
      } else if (!absl::EndsWith(tensor.name, ".bias")) {
        RandomNormals(4, tensor.name, 0, tensor.count, out);
        for (uint64_t i = 0; i < tensor.count; ++i) out[i] *= 0.02f;
      }
    }
    EXPECT_EQ(values, expected) << "unit " << u;
    const PlaneSpan planes = state->planes(u, 0, unit.count);
    EXPECT_TRUE(std::all_of(planes.m, planes.m + unit.count,
                            [](float m) { return m == 0; }));
    EXPECT_TRUE(std::all_of(planes.v, planes.v + unit.count,
                            [](float v) { return v == 0; }));
  }
}

}  // namespace
}  // namespace slidedp::hostd
