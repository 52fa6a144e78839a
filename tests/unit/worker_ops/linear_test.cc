#include "tests/unit/worker_ops/ops_fixture.h"

namespace slidedp::ops {
namespace {

struct Shape {
  int64_t tokens, in, out;
};

// One of each: single token, odd sizes, more than one tile of columns (192), of
// inner dimension (682 at 192 columns), of token rows.
const Shape kShapes[] = {{1, 40, 77},    {127, 40, 77},  {1, 1, 1},
                         {3, 1500, 200}, {300, 33, 401}, {700, 65, 1},
                         {129, 700, 640}};

class LinearTest : public testing::TestWithParam<Shape> {
 protected:
  LinearTest() {
    const auto [t, i, o] = GetParam();
    x = RandomFloats(t * i, 1);
    w = RandomBf16s(o * i, 2);
    bias = RandomBf16s(o, 3);
    d_y = RandomFloats(t * o, 4);
    reference::LinearBackward(Wide(x), Wide(w), Wide(d_y), t, i, o, want_d_x,
                              want_d_w, want_d_bias);
  }

  OpsBench ops;
  Floats x, d_y;
  Bf16s w, bias;
  Vec want_d_x, want_d_w, want_d_bias;
};

TEST_P(LinearTest, ForwardWritesProductAndBias) {
  const auto [t, i, o] = GetParam();
  for (const bool with_bias : {false, true}) {
    Floats y(t * o, kNaN);
    ops.Run(ops->LinearForward(x.data(), w.data(),
                               with_bias ? bias.data() : nullptr, t, i, o,
                               /*residual=*/nullptr, y.data(), ops.stream()));
    EXPECT_LT(RelativeError(y, reference::Linear(Wide(x), Wide(w),
                                                 with_bias ? Wide(bias) : Vec(),
                                                 t, i, o)),
              kTolerance);
  }
}

TEST_P(LinearTest, ForwardAddsToResidual) {
  const auto [t, i, o] = GetParam();
  const Floats residual = RandomFloats(t * o, 5);
  Floats y(t * o, kNaN), kept = residual;
  ops.Run(ops->LinearForward(x.data(), w.data(), bias.data(), t, i, o,
                             kept.data(), y.data(), ops.stream()));
  const Vec want =
      Plus(reference::Linear(Wide(x), Wide(w), Wide(bias), t, i, o), residual);
  EXPECT_LT(RelativeError(y, want), kTolerance);
  EXPECT_EQ(kept, residual);

  Floats in_place = residual;
  ops.Run(ops->LinearForward(x.data(), w.data(), bias.data(), t, i, o,
                             in_place.data(), in_place.data(), ops.stream()));
  EXPECT_EQ(in_place, y);
}

TEST_P(LinearTest, BackwardInputWritesOrAdds) {
  const auto [t, i, o] = GetParam();
  Floats d_x(t * i, kNaN);
  ops.Run(ops->LinearBackwardInput(d_y.data(), w.data(), t, i, o,
                                   /*add=*/false, d_x.data(), ops.stream()));
  EXPECT_LT(RelativeError(d_x, want_d_x), kTolerance);

  const Floats before = RandomFloats(t * i, 6);
  d_x = before;
  ops.Run(ops->LinearBackwardInput(d_y.data(), w.data(), t, i, o,
                                   /*add=*/true, d_x.data(), ops.stream()));
  EXPECT_LT(RelativeError(d_x, Plus(want_d_x, before)), kTolerance);
}

TEST_P(LinearTest, BackwardWeightWritesOrAddsToAccumulators) {
  const auto [t, i, o] = GetParam();
  const Floats w_before = RandomFloats(o * i, 7);
  const Floats bias_before = RandomFloats(o, 8);
  Floats d_w = w_before, d_bias = bias_before;
  ops.Run(ops->LinearBackwardWeight(x.data(), d_y.data(), t, i, o,
                                    /*add=*/true, d_w.data(), d_bias.data(),
                                    ops.stream()));
  EXPECT_LT(RelativeError(d_w, Plus(want_d_w, w_before)), kTolerance);
  EXPECT_LT(RelativeError(d_bias, Plus(want_d_bias, bias_before)), kTolerance);

  // Written, to the bit as if added to zeros; a bias is added to all the same.
  Floats added(o * i, 0.0f);
  ops.Run(ops->LinearBackwardWeight(x.data(), d_y.data(), t, i, o,
                                    /*add=*/true, added.data(),
                                    /*d_bias=*/nullptr, ops.stream()));
  EXPECT_LT(RelativeError(added, want_d_w), kTolerance);
  d_w.assign(o * i, kNaN);
  d_bias = bias_before;
  ops.Run(ops->LinearBackwardWeight(x.data(), d_y.data(), t, i, o,
                                    /*add=*/false, d_w.data(), d_bias.data(),
                                    ops.stream()));
  EXPECT_EQ(d_w, added);
  EXPECT_LT(RelativeError(d_bias, Plus(want_d_bias, bias_before)), kTolerance);
}

INSTANTIATE_TEST_SUITE_P(Shapes, LinearTest, testing::ValuesIn(kShapes),
                         [](const auto& info) {
                           return std::to_string(info.param.tokens) + "x" +
                                  std::to_string(info.param.in) + "x" +
                                  std::to_string(info.param.out);
                         });

TEST(LinearSplitTest, MicroBatchesAddUpToTheWholeBatch) {
  const int64_t in = 40, out = 77;
  OpsBench ops;
  const Floats x = RandomFloats(9 * in, 1), d_y = RandomFloats(9 * out, 2);
  Floats d_w(out * in, kNaN), d_bias(out, 0.0f);
  for (const auto& [first, count] : {std::pair{0, 1}, {1, 5}, {6, 3}}) {
    ops.Run(ops->LinearBackwardWeight(&x[first * in], &d_y[first * out], count,
                                      in, out, /*add=*/first > 0, d_w.data(),
                                      d_bias.data(), ops.stream()));
  }
  Vec d_x, want_d_w, want_d_bias;
  reference::LinearBackward(Wide(x), Vec(out * in, 0.0), Wide(d_y), 9, in, out,
                            d_x, want_d_w, want_d_bias);
  EXPECT_LT(RelativeError(d_w, want_d_w), kTolerance);
  EXPECT_LT(RelativeError(d_bias, want_d_bias), kTolerance);
}

TEST(LinearArgumentsTest, NoTokensAddNothing) {
  OpsBench ops;
  const Bf16s w = RandomBf16s(6, 1);
  Floats d_w(6, 2.0f), d_bias(2, 3.0f), none(1, 4.0f);
  ops.Run(ops->LinearForward(none.data(), w.data(), nullptr, 0, 3, 2, nullptr,
                             none.data(), ops.stream()));
  ops.Run(ops->LinearBackwardWeight(none.data(), none.data(), 0, 3, 2,
                                    /*add=*/true, d_w.data(), d_bias.data(),
                                    ops.stream()));
  EXPECT_EQ(none, Floats(1, 4.0f));
  EXPECT_EQ(d_w, Floats(6, 2.0f));
  EXPECT_EQ(d_bias, Floats(2, 3.0f));
  ops.Run(ops->LinearBackwardWeight(none.data(), none.data(), 0, 3, 2,
                                    /*add=*/false, d_w.data(), d_bias.data(),
                                    ops.stream()));
  EXPECT_EQ(d_w, Floats(6, 0.0f));
  EXPECT_EQ(d_bias, Floats(2, 3.0f));
}

TEST(LinearArgumentsTest, ImpossibleShapeIsRefusedAtOnce) {
  OpsBench ops;
  EXPECT_EQ(ops->LinearForward(nullptr, nullptr, nullptr, 1, 0, 2, nullptr,
                               nullptr, ops.stream())
                .code(),
            absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace slidedp::ops
