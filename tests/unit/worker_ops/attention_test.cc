#include "tests/unit/worker_ops/ops_fixture.h"

namespace slidedp::ops {
namespace {

class AttentionTest : public testing::TestWithParam<AttentionShape> {
 protected:
  AttentionTest() : shape(GetParam()) {
    qkv = RandomFloats(shape.tokens() * shape.qkv_dim(), 1);
    d_out = RandomFloats(shape.tokens() * shape.heads * shape.head_dim, 2);
  }
  const AttentionShape shape;
  Floats qkv, d_out;
};

void Forward(OpsBench& ops, const AttentionShape& shape, const Floats& qkv,
             Floats& out, Floats& lse) {
  out.assign(shape.tokens() * shape.heads * shape.head_dim, kNaN);
  lse.assign(shape.tokens() * shape.heads, kNaN);
  ops.Run(ops->AttentionForward(qkv.data(), shape, out.data(), lse.data(),
                                ops.stream()));
}

TEST_P(AttentionTest, ForwardAndBackwardMatchReference) {
  OpsBench ops;
  Floats out, lse;
  Forward(ops, shape, qkv, out, lse);
  Vec want_lse;
  EXPECT_LT(
      RelativeError(out, reference::Attention(Wide(qkv), shape, &want_lse)),
      kTolerance);
  EXPECT_LT(RelativeError(lse, want_lse), kTolerance);

  Floats d_qkv(qkv.size(), kNaN);
  ops.Run(ops->AttentionBackward(qkv.data(), out.data(), lse.data(),
                                 d_out.data(), shape, d_qkv.data(),
                                 ops.stream()));
  EXPECT_LT(RelativeError(d_qkv, reference::AttentionBackward(Wide(qkv), shape,
                                                              Wide(d_out))),
            kTolerance);
}

// Backward is cut differently when there are fewer kv heads than threads.
TEST_P(AttentionTest, ThreadsChangeNoBit) {
  Floats out[3], lse[3], d_qkv[3];
  for (int i = 0; i < 3; ++i) {
    OpsBench ops(std::vector<int>{1, 3, 7}[i]);
    Forward(ops, shape, qkv, out[i], lse[i]);
    d_qkv[i].assign(qkv.size(), kNaN);
    ops.Run(ops->AttentionBackward(qkv.data(), out[i].data(), lse[i].data(),
                                   d_out.data(), shape, d_qkv[i].data(),
                                   ops.stream()));
  }
  for (int i = 1; i < 3; ++i) {
    EXPECT_EQ(out[0], out[i]);
    EXPECT_EQ(lse[0], lse[i]);
    EXPECT_EQ(d_qkv[0], d_qkv[i]);
  }
}

// Blocks are 64 queries (128 beyond 512 tokens) by 256 keys.
INSTANTIATE_TEST_SUITE_P(Shapes, AttentionTest,
                         testing::Values(AttentionShape{1, 1, 3, 1, 40, 0},
                                         AttentionShape{1, 127, 3, 1, 40, 0},
                                         AttentionShape{1, 127, 3, 1, 40, 8},
                                         AttentionShape{1, 127, 3, 3, 16, 1},
                                         AttentionShape{2, 33, 6, 2, 16, 0},
                                         AttentionShape{3, 64, 2, 1, 2, 64},
                                         AttentionShape{2, 300, 2, 1, 8, 0},
                                         AttentionShape{1, 300, 2, 2, 8, 8},
                                         AttentionShape{1, 600, 2, 1, 64, 0},
                                         AttentionShape{1, 600, 2, 1, 8, 200},
                                         AttentionShape{1, 600, 1, 1, 8, 257}));

TEST(AttentionWindowTest, WindowOfOneCopiesOwnValue) {
  OpsBench ops;
  const AttentionShape shape{1, 5, 2, 1, 4, 1};
  const Floats qkv = RandomFloats(shape.tokens() * shape.qkv_dim(), 1);
  Floats out, lse;
  Forward(ops, shape, qkv, out, lse);
  for (int64_t t = 0; t < 5; ++t) {
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t i = 0; i < 4; ++i) {
        EXPECT_EQ(out[(t * 2 + h) * 4 + i], qkv[t * shape.qkv_dim() + 12 + i]);
      }
    }
  }
}

TEST(AttentionWindowTest, WindowOfSequenceEqualsNone) {
  OpsBench ops;
  const AttentionShape none{1, 300, 2, 1, 8, 0}, wide{1, 300, 2, 1, 8, 300};
  const Floats qkv = RandomFloats(none.tokens() * none.qkv_dim(), 1);
  Floats out[2], lse[2];
  Forward(ops, none, qkv, out[0], lse[0]);
  Forward(ops, wide, qkv, out[1], lse[1]);
  EXPECT_EQ(out[0], out[1]);
}

TEST(AttentionRangeTest, LargeScoresDoNotOverflow) {
  // exp of the raw scores would be infinite in float32, and the running maximum
  // moves by hundreds between key blocks.
  OpsBench ops;
  const AttentionShape shape{1, 600, 1, 1, 8, 0};
  Floats qkv = RandomFloats(shape.tokens() * shape.qkv_dim(), 1, 30);
  Floats out, lse;
  Forward(ops, shape, qkv, out, lse);
  // Scores up to 1000 carry an absolute error of 1000 * 2^-24 * a few, which
  // the exponential turns into a relative one.
  EXPECT_LT(RelativeError(out, reference::Attention(Wide(qkv), shape)), 1e-3);
}

TEST(AttentionRangeTest, NotANumberReachesTheOutput) {
  OpsBench ops;
  const AttentionShape shape{1, 70, 1, 1, 4, 0};
  Floats qkv = RandomFloats(shape.tokens() * shape.qkv_dim(), 1);
  qkv[65 * shape.qkv_dim()] = kNaN;  // a query
  Floats out, lse;
  Forward(ops, shape, qkv, out, lse);
  EXPECT_TRUE(std::isnan(out[65 * 4]));
  EXPECT_TRUE(std::isnan(lse[65]));
  EXPECT_TRUE(std::isfinite(out[64 * 4]));
}

TEST(AttentionTokenTest, LaterTokensDoNotReachEarlierOutputs) {
  OpsBench ops;
  const AttentionShape shape{1, 300, 2, 1, 8, 0};
  Floats qkv = RandomFloats(shape.tokens() * shape.qkv_dim(), 1);
  Floats before, after, lse;
  Forward(ops, shape, qkv, before, lse);
  for (int64_t i = 0; i < shape.qkv_dim(); ++i) {
    qkv[200 * shape.qkv_dim() + i] = 5;
  }
  Forward(ops, shape, qkv, after, lse);
  const auto cut = 200 * shape.heads * shape.head_dim;
  EXPECT_TRUE(std::equal(before.begin(), before.begin() + cut, after.begin()));
  EXPECT_FALSE(
      std::equal(before.begin() + cut, before.end(), after.begin() + cut));
}

}  // namespace
}  // namespace slidedp::ops
