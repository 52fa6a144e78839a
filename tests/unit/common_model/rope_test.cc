#include <cmath>

#include "common/base/bf16.h"
#include "common/model/config.h"
#include "gtest/gtest.h"
#include "tests/testing/tiny_model.h"

namespace slidedp::model {
namespace {

// The formulae of models in double, written down independently of the code:
// plain, and Llama 3's three bands over the wavelength.
double PlainFrequency(double theta, int64_t head_dim, int64_t i) {
  return std::pow(
      theta, -2.0 * static_cast<double>(i) / static_cast<double>(head_dim));
}

double Llama3Frequency(const RopeConfig& rope, double f) {
  double wavelength = 2 * M_PI / f;
  double ratio = rope.original_max_position / wavelength;
  if (ratio > rope.high_freq_factor) return f;
  if (ratio < rope.low_freq_factor) return f / rope.llama3_factor;
  double t = (ratio - rope.low_freq_factor) /
             (rope.high_freq_factor - rope.low_freq_factor);
  return (1 - t) * f / rope.llama3_factor + t * f;
}

ModelConfig Config(int64_t head_dim, double theta) {
  ModelConfig config;
  config.head_dim = head_dim;
  config.rope.theta = theta;
  return config;
}

TEST(RopeTest, PlainFrequenciesFollowTheFormula) {
  for (double theta : {1e4, 5e5, 1e6, 1e9}) {
    for (int64_t head_dim : {2, 6, 64, 128, 130}) {
      std::vector<float> f = RopeInverseFrequencies(Config(head_dim, theta));
      ASSERT_EQ(f.size(), static_cast<size_t>(head_dim / 2));
      EXPECT_EQ(f[0], 1.0f);
      for (int64_t i = 0; i < head_dim / 2; ++i) {
        double expected = PlainFrequency(theta, head_dim, i);
        // The exponent is rounded to float32, as in transformers.
        EXPECT_NEAR(f[i] / expected, 1, 2e-6) << theta << " " << i;
      }
    }
  }
}

TEST(RopeTest, Llama3ScalingHasThreeBands) {
  for (double factor : {8.0, 32.0}) {
    ModelConfig config = Config(128, 500000);
    config.rope.llama3_factor = factor;
    config.rope.low_freq_factor = 1;
    config.rope.high_freq_factor = 4;
    config.rope.original_max_position = 8192;
    std::vector<float> f = RopeInverseFrequencies(config);
    int kept = 0, blended = 0, stretched = 0;
    for (int64_t i = 0; i < 64; ++i) {
      double plain = PlainFrequency(500000, 128, i);
      double expected = Llama3Frequency(config.rope, plain);
      EXPECT_NEAR(f[i] / expected, 1, 2e-5) << i;
      double ratio = f[i] / plain;
      if (std::abs(ratio - 1) < 1e-5) {
        ++kept;
      } else if (std::abs(ratio * factor - 1) < 1e-5) {
        ++stretched;
      } else {
        ++blended;
      }
    }
    // Wavelengths below 2048 are kept, above 8192 stretched.
    EXPECT_EQ(kept, 29);
    EXPECT_EQ(blended, 6);
    EXPECT_EQ(stretched, 29);
  }
}

TEST(RopeTest, FrequenciesAreRoundedToBf16OnDemandOnly) {
  ModelConfig config = Config(64, 500000);
  std::vector<float> exact = RopeInverseFrequencies(config);
  config.rope.bf16_inverse_frequencies = true;
  std::vector<float> rounded = RopeInverseFrequencies(config);
  int changed = 0;
  for (size_t i = 0; i < exact.size(); ++i) {
    EXPECT_EQ(rounded[i], Bf16ToFloat(FloatToBf16Even(exact[i])));
    changed += rounded[i] != exact[i];
  }
  EXPECT_GT(changed, 20);
}

TEST(RopeTest, TinyModelsUseAllBands) {
  testing::TinyModelOptions options;
  options.family = Family::kLlama;
  options.llama3_rope = true;
  ModelConfig scaled = testing::TinyConfig(options);
  options.llama3_rope = false;
  ModelConfig plain = testing::TinyConfig(options);
  EXPECT_EQ(plain.rope.llama3_factor, 0);
  EXPECT_EQ(RopeInverseFrequencies(scaled)[0],
            RopeInverseFrequencies(plain)[0]);
  EXPECT_NEAR(RopeInverseFrequencies(scaled)[7] * 8,
              RopeInverseFrequencies(plain)[7], 1e-9);
}

}  // namespace
}  // namespace slidedp::model
