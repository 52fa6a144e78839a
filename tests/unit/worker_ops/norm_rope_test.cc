#include "tests/unit/worker_ops/ops_fixture.h"

namespace slidedp::ops {
namespace {

constexpr double kNormEps = 1e-5;

class RmsNormTest : public testing::TestWithParam<std::pair<int64_t, int64_t>> {
};

TEST_P(RmsNormTest, ForwardAndBackwardMatchReference) {
  const auto [t, h] = GetParam();
  OpsBench ops;
  const Floats x = RandomFloats(t * h, 1), d_out = RandomFloats(t * h, 2);
  const Bf16s w = RandomBf16s(h, 3, 1, 0.3);
  Floats out(t * h, kNaN), rstd(t, kNaN);
  ops.Run(ops->RmsNormForward(x.data(), w.data(), t, h, kNormEps, out.data(),
                              rstd.data(), ops.stream()));
  Vec want_rstd;
  EXPECT_LT(RelativeError(out, reference::RmsNorm(Wide(x), Wide(w), t, h,
                                                  kNormEps, &want_rstd)),
            kTolerance);
  EXPECT_LT(RelativeError(rstd, want_rstd), kTolerance);

  Vec want_d_x, want_d_w;
  reference::RmsNormBackward(Wide(x), Wide(w), Wide(d_out), t, h, kNormEps,
                             want_d_x, want_d_w);
  const Floats w_before = RandomFloats(h, 4), x_before = RandomFloats(t * h, 5);
  Floats d_x(t * h, kNaN), d_w = w_before;
  ops.Run(ops->RmsNormBackward(x.data(), w.data(), rstd.data(), d_out.data(), t,
                               h, /*add=*/false, d_x.data(), d_w.data(),
                               /*normed=*/nullptr, ops.stream()));
  EXPECT_LT(RelativeError(d_x, want_d_x), kTolerance);
  EXPECT_LT(RelativeError(d_w, Plus(want_d_w, w_before)), kTolerance);

  d_x = x_before;
  d_w.assign(h, 0.0f);
  Floats normed = d_out;  // in place
  ops.Run(ops->RmsNormBackward(x.data(), w.data(), rstd.data(), normed.data(),
                               t, h, /*add=*/true, d_x.data(), d_w.data(),
                               normed.data(), ops.stream()));
  EXPECT_EQ(normed, out);
  EXPECT_LT(RelativeError(d_x, Plus(want_d_x, x_before)), kTolerance);
  EXPECT_LT(RelativeError(d_w, want_d_w), kTolerance);
}

INSTANTIATE_TEST_SUITE_P(Shapes, RmsNormTest,
                         testing::Values(std::pair{1, 40}, std::pair{127, 40},
                                         std::pair{5, 3}, std::pair{17, 577}));

TEST(RmsNormRangeTest, ZeroRowGivesZeroAndTinyRowsAreScaledUp) {
  OpsBench ops;
  const Floats x = {0, 0, 3e-20f, 4e-20f};
  const Bf16s w(2, FloatToBf16Even(1));
  Floats out(4, kNaN), rstd(2, kNaN);
  ops.Run(ops->RmsNormForward(x.data(), w.data(), 2, 2, 0.0625, out.data(),
                              rstd.data(), ops.stream()));
  EXPECT_EQ(out[0], 0);
  EXPECT_FLOAT_EQ(rstd[0], 4);
  EXPECT_FLOAT_EQ(out[3], 16e-20f);
}

struct RopeCase {
  AttentionShape shape;
  bool norm;
};

class QkNormRopeTest : public testing::TestWithParam<RopeCase> {};

TEST_P(QkNormRopeTest, ForwardAndBackwardMatchReference) {
  const AttentionShape& s = GetParam().shape;
  OpsBench ops;
  const int64_t d = s.head_dim, count = s.tokens() * s.qkv_dim();
  const int64_t rotated = s.heads + s.kv_heads;
  const Floats qkv = RandomFloats(count, 1), d_out = RandomFloats(count, 2);
  const Bf16s q_norm = RandomBf16s(d, 3, 1, 0.3);
  const Bf16s k_norm = RandomBf16s(d, 4, 1, 0.3);
  Floats inverse(d / 2);
  for (int64_t i = 0; i < d / 2; ++i) {
    inverse[i] = static_cast<float>(std::pow(10000.0, -2.0 * i / d));
  }
  const bool norm = GetParam().norm;
  const bf16* q_w = norm ? q_norm.data() : nullptr;
  const bf16* k_w = norm ? k_norm.data() : nullptr;
  const Vec q_wide = norm ? Wide(q_norm) : Vec();
  const Vec k_wide = norm ? Wide(k_norm) : Vec();

  Floats out(count, kNaN), rstd(norm ? s.tokens() * rotated : 0, kNaN);
  ops.Run(ops->QkNormRopeForward(qkv.data(), q_w, k_w, kNormEps, inverse.data(),
                                 s, out.data(), rstd.data(), ops.stream()));
  EXPECT_LT(RelativeError(out, reference::QkNormRope(Wide(qkv), q_wide, k_wide,
                                                     kNormEps, inverse, s)),
            kTolerance);
  for (int64_t t = 0; t < s.tokens(); ++t) {
    for (int64_t i = rotated * d; i < s.qkv_dim(); ++i) {
      ASSERT_EQ(out[t * s.qkv_dim() + i], qkv[t * s.qkv_dim() + i]);
    }
  }

  Vec want_d, want_q, want_k;
  reference::QkNormRopeBackward(Wide(qkv), q_wide, k_wide, kNormEps, inverse, s,
                                Wide(d_out), want_d, want_q, want_k);
  Floats d_qkv = d_out, d_q = RandomFloats(d, 5), d_k = RandomFloats(d, 6);
  want_q = Plus(want_q, d_q);
  want_k = Plus(want_k, d_k);
  ops.Run(ops->QkNormRopeBackward(
      qkv.data(), q_w, k_w, inverse.data(), s, rstd.data(), d_qkv.data(),
      norm ? d_q.data() : nullptr, norm ? d_k.data() : nullptr, ops.stream()));
  EXPECT_LT(RelativeError(d_qkv, want_d), kTolerance);
  EXPECT_LT(RelativeError(d_q, want_q), kTolerance);
  EXPECT_LT(RelativeError(d_k, want_k), kTolerance);
}

INSTANTIATE_TEST_SUITE_P(Shapes, QkNormRopeTest,
                         testing::Values(RopeCase{{1, 1, 3, 1, 40, 0}, true},
                                         RopeCase{{1, 1, 3, 1, 40, 0}, false},
                                         RopeCase{{1, 127, 3, 1, 16, 8}, true},
                                         RopeCase{{2, 65, 4, 2, 64, 0}, true},
                                         RopeCase{{2, 65, 4, 2, 64, 0}, false},
                                         RopeCase{{3, 9, 2, 2, 2, 0}, true}));

TEST(RopeTest, FarPositionsKeepFullPrecision) {
  // At position 40000 a fast sine without exact argument reduction is off by
  // more than float32 rounding.
  OpsBench ops;
  const AttentionShape s{1, 40001, 1, 1, 2, 0};
  const Floats inverse = {1.0f};
  Floats qkv(s.tokens() * s.qkv_dim(), 1.0f), out(qkv.size(), kNaN);
  ops.Run(ops->QkNormRopeForward(qkv.data(), nullptr, nullptr, 0,
                                 inverse.data(), s, out.data(), nullptr,
                                 ops.stream()));
  const float* last = &out[40000 * s.qkv_dim()];
  EXPECT_NEAR(last[0], std::cos(40000.0) - std::sin(40000.0), 2e-7);
  EXPECT_NEAR(last[1], std::cos(40000.0) + std::sin(40000.0), 2e-7);
}

TEST(RopeTest, OddHeadIsRefusedAtOnce) {
  OpsBench ops;
  EXPECT_EQ(
      ops->QkNormRopeForward(nullptr, nullptr, nullptr, 0, nullptr,
                             {1, 1, 1, 1, 3, 0}, nullptr, nullptr, ops.stream())
          .code(),
      absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace slidedp::ops
