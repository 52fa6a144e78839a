// Packed documents: each is computed as if it were alone.
#include <numeric>

#include "tests/unit/worker_ops/ops_fixture.h"

namespace slidedp::ops {
namespace {

struct Packed {
  // Documents' lengths, sequence by sequence.
  std::vector<std::vector<int64_t>> lengths;
  int64_t heads, kv_heads, head_dim, window;
};

class PackedTest : public testing::TestWithParam<Packed> {
 protected:
  PackedTest() {
    const Packed& c = GetParam();
    const auto& first = c.lengths.front();
    whole = {static_cast<int64_t>(c.lengths.size()),
             std::accumulate(first.begin(), first.end(), int64_t{0}),
             c.heads,
             c.kv_heads,
             c.head_dim,
             c.window};
    int32_t row = 0;
    for (const auto& sequence : c.lengths) {
      for (const int64_t length : sequence) {
        offsets.push_back(row);
        first_row.insert(first_row.end(), length, row);
        row += static_cast<int32_t>(length);
      }
    }
    // One place more than there are documents.
    offsets.insert(offsets.end(), 2, row);
    whole.documents = {first_row.data(), offsets.data(),
                       static_cast<int64_t>(offsets.size()) - 1};
    qkv = RandomFloats(whole.tokens() * whole.qkv_dim(), 1);
    d_out = RandomFloats(whole.tokens() * c.heads * c.head_dim, 2);
  }

  // check(shape of one document, its first row).
  template <typename Check>
  void ForDocuments(Check check) {
    for (size_t n = 0; offsets[n] < whole.tokens(); ++n) {
      SCOPED_TRACE(n);
      AttentionShape one = whole;
      one.batch = 1;
      one.sequence = offsets[n + 1] - offsets[n];
      one.documents = {};
      check(one, offsets[n]);
    }
  }
  static Floats Rows(const Floats& all, int64_t first, int64_t rows,
                     int64_t columns) {
    const auto begin = all.begin() + first * columns;
    return Floats(begin, begin + rows * columns);
  }

  AttentionShape whole;
  std::vector<int32_t> first_row, offsets;
  Floats qkv, d_out;
};

TEST_P(PackedTest, AttentionStaysWithinDocuments) {
  for (const int threads : {1, 7}) {
    OpsBench ops(threads);
    const int64_t width = whole.qkv_dim();
    const int64_t columns = whole.heads * whole.head_dim;
    const auto run = [&](const AttentionShape& s, const Floats& in,
                         const Floats& gradient, Floats& out, Floats& d_in) {
      Floats lse(s.tokens() * s.heads, kNaN);
      out.assign(s.tokens() * columns, kNaN);
      d_in.assign(s.tokens() * width, kNaN);
      ops.Run(ops->AttentionForward(in.data(), s, out.data(), lse.data(),
                                    ops.stream()));
      ops.Run(ops->AttentionBackward(in.data(), out.data(), lse.data(),
                                     gradient.data(), s, d_in.data(),
                                     ops.stream()));
    };
    Floats out, d_qkv;
    run(whole, qkv, d_out, out, d_qkv);
    ForDocuments([&](const AttentionShape& one, int64_t first) {
      Floats want, want_d;
      run(one, Rows(qkv, first, one.sequence, width),
          Rows(d_out, first, one.sequence, columns), want, want_d);
      EXPECT_LT(
          RelativeError(Rows(out, first, one.sequence, columns), Wide(want)),
          1e-5);
      EXPECT_LT(
          RelativeError(Rows(d_qkv, first, one.sequence, width), Wide(want_d)),
          1e-5);
    });
    EXPECT_LT(RelativeError(out, reference::Attention(Wide(qkv), whole)),
              kTolerance);
    EXPECT_LT(RelativeError(d_qkv, reference::AttentionBackward(
                                       Wide(qkv), whole, Wide(d_out))),
              kTolerance);
  }
}

TEST_P(PackedTest, PositionsRestartWithEachDocument) {
  OpsBench ops;
  const int64_t d = whole.head_dim, width = whole.qkv_dim();
  const Bf16s q_norm = RandomBf16s(d, 3, 1, 0.3);
  const Bf16s k_norm = RandomBf16s(d, 4, 1, 0.3);
  Floats inverse(d / 2);
  for (int64_t i = 0; i < d / 2; ++i) {
    inverse[i] = static_cast<float>(std::pow(100.0, -2.0 * i / d));
  }
  const Floats d_turned = RandomFloats(qkv.size(), 5);
  const auto run = [&](const AttentionShape& s, const Floats& in, Floats& out,
                       Floats& gradient) {
    Floats rstd(s.tokens() * (s.heads + s.kv_heads), kNaN);
    Floats d_q(d, 0.0f), d_k(d, 0.0f);
    out.assign(in.size(), kNaN);
    ops.Run(ops->QkNormRopeForward(in.data(), q_norm.data(), k_norm.data(),
                                   1e-6, inverse.data(), s, out.data(),
                                   rstd.data(), ops.stream()));
    ops.Run(ops->QkNormRopeBackward(
        in.data(), q_norm.data(), k_norm.data(), inverse.data(), s, rstd.data(),
        gradient.data(), d_q.data(), d_k.data(), ops.stream()));
  };
  Floats out, d_qkv = d_turned;
  run(whole, qkv, out, d_qkv);
  ForDocuments([&](const AttentionShape& one, int64_t first) {
    Floats want, want_d = Rows(d_turned, first, one.sequence, width);
    run(one, Rows(qkv, first, one.sequence, width), want, want_d);
    EXPECT_EQ(Rows(out, first, one.sequence, width), want);
    EXPECT_EQ(Rows(d_qkv, first, one.sequence, width), want_d);
  });
}

// Documents within, at and across blocks of queries (64, 128) and keys (256).
INSTANTIATE_TEST_SUITE_P(
    Shapes, PackedTest,
    testing::Values(Packed{{{1}}, 2, 1, 4, 0}, Packed{{{3, 1, 5}}, 3, 1, 8, 0},
                    Packed{{{40, 24}, {1, 63}, {64}}, 4, 2, 16, 0},
                    Packed{{{100, 28, 1, 171}}, 2, 1, 8, 0},
                    Packed{{{100, 28, 1, 171}}, 2, 2, 8, 20},
                    Packed{{{256, 300, 44}, {599, 1}}, 2, 1, 8, 0},
                    Packed{{{256, 300, 44}, {10, 590}}, 2, 1, 8, 270}));

}  // namespace
}  // namespace slidedp::ops
