// SwiGLU, embedding, cast, squared norm, cross-entropy.
#include "tests/unit/worker_ops/ops_fixture.h"

namespace slidedp::ops {
namespace {

class SwiGluTest : public testing::TestWithParam<std::pair<int64_t, int64_t>> {
};

TEST_P(SwiGluTest, ForwardAndBackwardMatchReference) {
  const auto [t, n] = GetParam();
  OpsBench ops;
  const Floats gate_up = RandomFloats(t * 2 * n, 1, 3);
  const Floats d_out = RandomFloats(t * n, 2);
  Floats out(t * n, kNaN);
  ops.Run(ops->SwiGluForward(gate_up.data(), t, n, out.data(), ops.stream()));
  EXPECT_LT(RelativeError(out, reference::SwiGlu(Wide(gate_up), t, n)),
            kTolerance);

  const Vec want = reference::SwiGluBackward(Wide(gate_up), Wide(d_out), t, n);
  Floats d(t * 2 * n, kNaN);
  ops.Run(ops->SwiGluBackward(gate_up.data(), d_out.data(), t, n, d.data(),
                              nullptr, ops.stream()));
  EXPECT_LT(RelativeError(d, want), kTolerance);

  Floats in_place = gate_up, activated = d_out;
  ops.Run(ops->SwiGluBackward(in_place.data(), activated.data(), t, n,
                              in_place.data(), activated.data(), ops.stream()));
  EXPECT_EQ(in_place, d);
  EXPECT_EQ(activated, out);
}

INSTANTIATE_TEST_SUITE_P(Shapes, SwiGluTest,
                         testing::Values(std::pair{1, 1}, std::pair{1, 40},
                                         std::pair{127, 77},
                                         std::pair{16, 96}));

TEST(SwiGluRangeTest, ExtremeGatesStayFinite) {
  OpsBench ops;
  const Floats gates = {-3e38f, -200, -88.5f, 0, 30, 200, 1e30f};
  const int64_t n = static_cast<int64_t>(gates.size());
  Floats gate_up = gates, out(n, kNaN), d(2 * n, kNaN);
  gate_up.insert(gate_up.end(), n, 1.0f);
  const Floats d_out(n, 1.0f);
  ops.Run(ops->SwiGluForward(gate_up.data(), 1, n, out.data(), ops.stream()));
  ops.Run(ops->SwiGluBackward(gate_up.data(), d_out.data(), 1, n, d.data(),
                              nullptr, ops.stream()));
  for (int64_t i = 0; i < n; ++i) {
    const double g = gates[i];
    const double want = g < -745 ? 0 : g / (1 + std::exp(-g));
    // 1e-35: the exponential is 0 where it would be subnormal.
    EXPECT_NEAR(out[i], want, std::abs(want) * 1e-6 + 1e-35) << g;
    EXPECT_NEAR(d[i], g > 0 ? 1 : (g == 0 ? 0.5 : 0), 1e-6) << g;
    EXPECT_EQ(d[n + i], out[i]) << g;
  }
}

TEST(EmbeddingTest, ForwardIsTheRowExactly) {
  OpsBench ops;
  const int64_t hidden = 40, vocab = 77, tokens = 127;
  const Bf16s table = RandomBf16s(vocab * hidden, 1);
  const auto ids = RandomIds(tokens, vocab, 2);
  Floats out(tokens * hidden, kNaN);
  ops.Run(ops->EmbeddingForward(ids.data(), table.data(), tokens, hidden, vocab,
                                out.data(), ops.stream()));
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = 0; i < hidden; ++i) {
      ASSERT_EQ(out[t * hidden + i], Bf16ToFloat(table[ids[t] * hidden + i]));
    }
  }
}

TEST(EmbeddingTest, BackwardAddsRepeatedIdsInOrder) {
  OpsBench ops;
  const int64_t hidden = 40, vocab = 5, tokens = 127;
  const Floats d_out = RandomFloats(tokens * hidden, 1);
  const auto ids = RandomIds(tokens, vocab, 2);
  Floats want = RandomFloats(vocab * hidden, 3), d_table = want;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t i = 0; i < hidden; ++i) {
      want[ids[t] * hidden + i] += d_out[t * hidden + i];
    }
  }
  ops.Run(ops->EmbeddingBackward(ids.data(), d_out.data(), tokens, hidden,
                                 vocab, d_table.data(), ops.stream()));
  EXPECT_EQ(d_table, want);
}

TEST(EmbeddingTest, IdOutsideVocabularySurfacesAtSynchronize) {
  OpsBench ops;
  const std::vector<int32_t> ids = {1, 5};
  const Floats d_out(2, 1.0f);
  Floats d_table(5, 0.0f);
  ASSERT_TRUE(ops->EmbeddingBackward(ids.data(), d_out.data(), 2, 1, 5,
                                     d_table.data(), ops.stream())
                  .ok());
  const absl::Status status = ops.Synchronize();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_NE(status.ToString().find("token 1 has id 5 of 5"), std::string::npos)
      << status;
}

TEST(CastTest, RoundsToNearestEvenLikeTheScalar) {
  OpsBench ops;
  std::mt19937 random(1);
  Floats x = {0.0f, -0.0f, INFINITY, -INFINITY, 3.4e38f, 1e-42f, 1.00390625f};
  while (x.size() < 70001)
    x.push_back(std::bit_cast<float>(uint32_t(random())));
  x.push_back(kNaN);
  x.push_back(std::bit_cast<float>(0x7f800001u));  // NaN in the low half only
  Bf16s out(x.size());
  ops.Run(ops->CastToBf16(x.data(), x.size(), out.data(), ops.stream()));
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_EQ(out[i], FloatToBf16Even(x[i]))
        << i << " " << std::bit_cast<uint32_t>(x[i]);
  }
}

TEST(CopyUsedRowsTest, OtherRowsStayAsTheyAre) {
  OpsBench ops;
  const int64_t rows = 131, words = 3;
  for (const int64_t width : {1, 7, 40}) {
    const Bf16s table = RandomBf16s(rows * width, 1);
    // Rows of either set; of both; the first and the last.
    std::vector<uint64_t> bitmaps(2 * words);
    std::vector<char> used(rows);
    for (int64_t row = 0; row < rows; ++row) {
      for (int set = 0; set < 2; ++set) {
        if (row % (3 + 2 * set) != 0 && row + set != rows) continue;
        bitmaps[set * words + row / 64] |= uint64_t{1} << (row % 64);
        used[row] = true;
      }
    }
    // All; from within a row to within another; within one.
    for (const auto& [begin, end] :
         {std::pair<int64_t, int64_t>{0, rows * width},
          {width / 2, 65 * width + width / 3},
          {3 * width, 3 * width + (width + 1) / 2},
          {64 * width, 64 * width}}) {
      SCOPED_TRACE(testing::Message()
                   << width << ": " << begin << " to " << end);
      Bf16s out(end - begin, 0x7fff), want = out;
      for (int64_t i = begin; i < end; ++i) {
        if (used[i / width]) want[i - begin] = table[i];
      }
      ops.Run(ops->CopyUsedRows({bitmaps.data(), words, 2}, width, begin,
                                end - begin, table.data() + begin, out.data(),
                                ops.stream()));
      EXPECT_EQ(out, want);
    }
  }
}

TEST(SquaredNormTest, SumsInFloat64AndOverwrites) {
  OpsBench ops;
  for (const int64_t count : {0, 1, 31, 65536, 200001}) {
    const Bf16s x = RandomBf16s(count, 1);
    double want = 0, norm = kNaN;
    for (bf16 value : x)
      want += double(Bf16ToFloat(value)) * Bf16ToFloat(value);
    ops.Run(ops->SquaredNorm(x.data(), count, &norm, ops.stream()));
    EXPECT_NEAR(norm, want, want * 1e-12);
  }
}

TEST(SquaredNormTest, RangeIsThatOfFloat64) {
  OpsBench ops;
  const Bf16s large(9, FloatToBf16Even(1e38f));
  double norm = 0;
  ops.Run(ops->SquaredNorm(large.data(), 9, &norm, ops.stream()));
  const double value = Bf16ToFloat(large[0]);
  EXPECT_DOUBLE_EQ(norm, 9 * value * value);
  const Bf16s broken = {0, 0x7fc0};
  ops.Run(ops->SquaredNorm(broken.data(), 2, &norm, ops.stream()));
  EXPECT_TRUE(std::isnan(norm));
}

TEST(CrossEntropyTest, LossAndGradientMatchReference) {
  OpsBench ops;
  for (const int64_t rows : {1, 127}) {
    const int64_t vocab = 77;
    const Floats logits = RandomFloats(rows * vocab, 1, 4);
    auto labels = RandomIds(rows, vocab, 2);
    for (int64_t t = 1; t < rows; t += 3) labels[t] = -1;
    Vec want;
    const double scale = 1.0 / 64;
    const double want_loss =
        reference::CrossEntropy(Wide(logits), labels, vocab, scale, &want);
    Floats gradient = logits;
    double loss = 10;
    ops.Run(ops->CrossEntropy(gradient.data(), labels.data(), rows, vocab,
                              static_cast<float>(scale), &loss, ops.stream()));
    // The sum is float64, its terms carry one float32 exponential each.
    EXPECT_NEAR(loss - 10, want_loss, want_loss * 1e-7);
    EXPECT_LT(RelativeError(gradient, want), kTolerance);
    for (int64_t t = 1; t < rows; t += 3) {
      for (int64_t i = 0; i < vocab; ++i) {
        ASSERT_EQ(gradient[t * vocab + i], 0.0f);
      }
    }
  }
}

TEST(CrossEntropyTest, MaskedRowsHideNotANumber) {
  OpsBench ops;
  Floats logits(4, kNaN);
  const std::vector<int32_t> labels = {-1, -100};
  double loss = 1;
  ops.Run(ops->CrossEntropy(logits.data(), labels.data(), 2, 2, 1, &loss,
                            ops.stream()));
  EXPECT_EQ(loss, 1);
  EXPECT_EQ(logits, Floats(4, 0.0f));
}

TEST(CrossEntropyTest, NotANumberAndInfinityReachTheLoss) {
  OpsBench ops;
  // Beside plain values in the same vector, and in the scalar tail.
  for (const float bad : {kNaN, std::numeric_limits<float>::infinity()}) {
    for (const int64_t at : {0, 3, 32}) {
      Floats logits(33, 0.5f);
      logits[at] = bad;
      const std::vector<int32_t> labels = {5};
      double loss = 0;
      ops.Run(ops->CrossEntropy(logits.data(), labels.data(), 1, 33, 1, &loss,
                                ops.stream()));
      EXPECT_FALSE(std::isfinite(loss)) << bad << " at " << at;
    }
  }
}

TEST(CrossEntropyTest, LargeLogitsDoNotOverflow) {
  OpsBench ops;
  Floats logits = {1e30f, -1e30f, 1e30f};
  const std::vector<int32_t> labels = {0};
  double loss = 0;
  ops.Run(ops->CrossEntropy(logits.data(), labels.data(), 1, 3, 1, &loss,
                            ops.stream()));
  EXPECT_DOUBLE_EQ(loss, std::log(2.0));
  EXPECT_EQ(logits, Floats({-0.5f, 0, 0.5f}));
}

TEST(CrossEntropyTest, LabelOutsideVocabularySurfacesAtSynchronize) {
  OpsBench ops;
  Floats logits(3, 0.0f);
  const std::vector<int32_t> labels = {3};
  double loss = 0;
  ASSERT_TRUE(ops->CrossEntropy(logits.data(), labels.data(), 1, 3, 1, &loss,
                                ops.stream())
                  .ok());
  EXPECT_EQ(ops.Synchronize().code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace slidedp::ops
