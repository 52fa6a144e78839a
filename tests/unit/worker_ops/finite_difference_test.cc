// Backward ops against central differences of the float64 forward reference:
// independent of any derivation of a gradient. With step 1e-4 and float64 the
// difference itself is good to about 1e-8; what is left is float32 rounding.
#include <functional>

#include "tests/unit/worker_ops/ops_fixture.h"

namespace slidedp::ops {
namespace {

constexpr double kEps = 1e-5;
constexpr double kStep = 1e-4;

// Gradient of `loss` at `x`.
Vec Differences(Vec x, const std::function<double(const Vec&)>& loss) {
  Vec gradient(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double value = x[i];
    x[i] = value + kStep;
    const double above = loss(x);
    x[i] = value - kStep;
    gradient[i] = (above - loss(x)) / (2 * kStep);
    x[i] = value;
  }
  return gradient;
}

double Dot(const Vec& a, const Floats& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

TEST(FiniteDifferenceTest, RmsNorm) {
  OpsBench ops;
  const int64_t t = 3, h = 7;
  const Floats x = RandomFloats(t * h, 1), d_out = RandomFloats(t * h, 2);
  const Bf16s w = RandomBf16s(h, 3, 1, 0.3);
  Floats out(t * h), rstd(t), d_x(t * h), d_w(h, 0.0f);
  ops.Run(ops->RmsNormForward(x.data(), w.data(), t, h, kEps, out.data(),
                              rstd.data(), ops.stream()));
  ops.Run(ops->RmsNormBackward(x.data(), w.data(), rstd.data(), d_out.data(), t,
                               h, false, d_x.data(), d_w.data(), nullptr,
                               ops.stream()));
  EXPECT_LT(RelativeError(d_x, Differences(Wide(x),
                                           [&](const Vec& at) {
                                             return Dot(
                                                 reference::RmsNorm(at, Wide(w),
                                                                    t, h, kEps),
                                                 d_out);
                                           })),
            kTolerance);
  EXPECT_LT(RelativeError(d_w, Differences(Wide(w),
                                           [&](const Vec& at) {
                                             return Dot(
                                                 reference::RmsNorm(Wide(x), at,
                                                                    t, h, kEps),
                                                 d_out);
                                           })),
            kTolerance);
}

TEST(FiniteDifferenceTest, SwiGlu) {
  OpsBench ops;
  const int64_t t = 3, n = 5;
  const Floats gate_up = RandomFloats(t * 2 * n, 1, 2);
  const Floats d_out = RandomFloats(t * n, 2);
  Floats d(gate_up.size());
  ops.Run(ops->SwiGluBackward(gate_up.data(), d_out.data(), t, n, d.data(),
                              nullptr, ops.stream()));
  EXPECT_LT(RelativeError(
                d, Differences(Wide(gate_up),
                               [&](const Vec& at) {
                                 return Dot(reference::SwiGlu(at, t, n), d_out);
                               })),
            kTolerance);
}

TEST(FiniteDifferenceTest, CrossEntropy) {
  OpsBench ops;
  const int64_t rows = 4, vocab = 13;
  const Floats logits = RandomFloats(rows * vocab, 1, 2);
  const std::vector<int32_t> labels = {0, 12, -1, 5};
  Floats gradient = logits;
  double loss = 0;
  ops.Run(ops->CrossEntropy(gradient.data(), labels.data(), rows, vocab, 0.25f,
                            &loss, ops.stream()));
  EXPECT_LT(RelativeError(gradient,
                          Differences(Wide(logits),
                                      [&](const Vec& at) {
                                        return 0.25 * reference::CrossEntropy(
                                                          at, labels, vocab, 1);
                                      })),
            kTolerance);
}

TEST(FiniteDifferenceTest, QkNormRope) {
  OpsBench ops;
  const AttentionShape shape{2, 3, 3, 1, 6, 0};
  const int64_t count = shape.tokens() * shape.qkv_dim();
  const Floats qkv = RandomFloats(count, 1), d_out = RandomFloats(count, 2);
  const Bf16s q_norm = RandomBf16s(6, 3, 1, 0.3);
  const Bf16s k_norm = RandomBf16s(6, 4, 1, 0.3);
  const Floats inverse = {1.0f, 0.3f, 0.01f};
  Floats out(count), rstd(shape.tokens() * 4), d_qkv = d_out;
  Floats d_q(6, 0.0f), d_k(6, 0.0f);
  ops.Run(ops->QkNormRopeForward(qkv.data(), q_norm.data(), k_norm.data(), kEps,
                                 inverse.data(), shape, out.data(), rstd.data(),
                                 ops.stream()));
  ops.Run(ops->QkNormRopeBackward(
      qkv.data(), q_norm.data(), k_norm.data(), inverse.data(), shape,
      rstd.data(), d_qkv.data(), d_q.data(), d_k.data(), ops.stream()));
  const auto loss = [&](const Vec& x, const Vec& q, const Vec& k) {
    return Dot(reference::QkNormRope(x, q, k, kEps, inverse, shape), d_out);
  };
  const Vec x = Wide(qkv), q = Wide(q_norm), k = Wide(k_norm);
  EXPECT_LT(
      RelativeError(
          d_qkv, Differences(x, [&](const Vec& at) { return loss(at, q, k); })),
      kTolerance);
  EXPECT_LT(
      RelativeError(
          d_q, Differences(q, [&](const Vec& at) { return loss(x, at, k); })),
      kTolerance);
  EXPECT_LT(
      RelativeError(
          d_k, Differences(k, [&](const Vec& at) { return loss(x, q, at); })),
      kTolerance);
}

class AttentionDifferenceTest : public testing::TestWithParam<int64_t> {};

TEST_P(AttentionDifferenceTest, Attention) {
  OpsBench ops;
  const AttentionShape shape{2, 9, 3, 1, 4, GetParam()};
  const Floats qkv = RandomFloats(shape.tokens() * shape.qkv_dim(), 1);
  const Floats d_out = RandomFloats(shape.tokens() * 12, 2);
  Floats out(d_out.size()), lse(shape.tokens() * 3), d_qkv(qkv.size());
  ops.Run(ops->AttentionForward(qkv.data(), shape, out.data(), lse.data(),
                                ops.stream()));
  ops.Run(ops->AttentionBackward(qkv.data(), out.data(), lse.data(),
                                 d_out.data(), shape, d_qkv.data(),
                                 ops.stream()));
  EXPECT_LT(RelativeError(d_qkv, Differences(Wide(qkv),
                                             [&](const Vec& at) {
                                               return Dot(reference::Attention(
                                                              at, shape),
                                                          d_out);
                                             })),
            kTolerance);
}

INSTANTIATE_TEST_SUITE_P(Windows, AttentionDifferenceTest,
                         testing::Values(0, 1, 4));

}  // namespace
}  // namespace slidedp::ops
