// Split planes and values for tests of AdamW, and every SIMD target.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "hostd/store/split.h"
#include "hostd/update/adamw.h"
#include "hwy/targets.h"

namespace slidedp::hostd {

inline constexpr uint64_t kMargin =
    32;  // elements on both sides that must not change

// Planes and gradients on the heap, so that ASan sees a step over the end.
struct Planes {
  std::vector<bf16> hi;
  std::vector<int16_t> lo;
  std::vector<float> m, v;

  PlaneSpan Span(uint64_t begin, uint64_t count) {
    return {hi.data() + begin, lo.data() + begin, m.data() + begin,
            v.data() + begin, count};
  }
  void Add(float p, float m_value, float v_value) {
    bf16 h;
    int16_t l;
    SplitFloat(p, h, l);
    hi.push_back(h);
    lo.push_back(l);
    m.push_back(m_value);
    v.push_back(v_value);
  }
  float p(uint64_t i) const { return JoinFloat(hi[i], lo[i]); }
};

inline ::testing::AssertionResult SameBits(const Planes& a, const Planes& b) {
  for (uint64_t i = 0; i < a.hi.size(); ++i) {
    if (a.hi[i] != b.hi[i] || a.lo[i] != b.lo[i] ||
        std::bit_cast<uint32_t>(a.m[i]) != std::bit_cast<uint32_t>(b.m[i]) ||
        std::bit_cast<uint32_t>(a.v[i]) != std::bit_cast<uint32_t>(b.v[i])) {
      return ::testing::AssertionFailure()
             << "element " << i << ": p " << a.p(i) << " / " << b.p(i) << ", m "
             << a.m[i] << " / " << b.m[i] << ", v " << a.v[i] << " / "
             << b.v[i];
    }
  }
  return ::testing::AssertionSuccess();
}

enum class Values { kUsual, kDenormal, kHuge, kAnyBits };

class Source {
 public:
  Source(Values values, uint32_t seed) : values_(values), random_(seed) {}

  float Finite() {
    for (;;) {
      float x = 0;
      switch (values_) {
        case Values::kUsual:
          x = std::normal_distribution<float>(0, 0.05f)(random_);
          break;
        case Values::kDenormal:
          x = std::bit_cast<float>(
              static_cast<uint32_t>(random_() & 0x80ffffffu));
          break;
        case Values::kHuge:
          x = std::bit_cast<float>(
              static_cast<uint32_t>((random_() & 0x80ffffffu) | 0x7e000000u));
          break;
        case Values::kAnyBits:
          x = std::bit_cast<float>(static_cast<uint32_t>(random_()));
          break;
      }
      if (Splittable(x)) return x;
    }
  }
  // Any bfloat16; NaN and infinity among them for kAnyBits.
  bf16 Gradient() {
    return values_ == Values::kAnyBits ? static_cast<bf16>(random_())
                                       : FloatToBf16Even(Finite());
  }
  Planes MakePlanes(uint64_t count) {
    Planes planes;
    for (uint64_t i = 0; i < count; ++i) {
      const float p = Finite(), m = Finite();
      planes.Add(p, m, std::fabs(Finite()));
    }
    return planes;
  }

 private:
  Values values_;
  std::mt19937 random_;
};

inline AdamWStep UsualStep(uint64_t t, double grad_scale) {
  return MakeAdamWStep(3e-4, 0.9, 0.999, 1e-8, 0.1, t, grad_scale);
}

// The targets that were compiled and that this CPU has.
inline std::vector<int64_t> Targets() {
  std::vector<int64_t> targets;
  const int64_t supported = hwy::SupportedTargets();
  for (int64_t bit = 1; bit > 0; bit <<= 1) {
    if (supported & bit) targets.push_back(bit);
  }
  return targets;
}

class AdamWTargetTest : public ::testing::Test {
 protected:
  void Choose(int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
  void TearDown() override {
    hwy::SetSupportedTargetsForTest(0);
    hwy::GetChosenTarget().DeInit();
  }

  // One update of the same range by the chosen target and by the reference.
  template <typename G>
  void ExpectSameAsScalar(const Planes& start, const std::vector<G>& g,
                          uint64_t offset, uint64_t count, bool decay,
                          const AdamWStep& step) {
    Planes simd = start, scalar = start;
    const bool simd_ok =
        AdamWUpdate(simd.Span(offset, count), g.data(), decay, step);
    const bool scalar_ok =
        AdamWUpdateScalar(scalar.Span(offset, count), g.data(), decay, step);
    EXPECT_EQ(simd_ok, scalar_ok);
    EXPECT_TRUE(SameBits(simd, scalar))
        << AdamWTargetName() << ", count " << count << ", offset " << offset;
  }
};

}  // namespace slidedp::hostd
