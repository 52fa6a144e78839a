// Every op but linear and attention on the GPU, against the CPU ops on the same
// values, in BF16 and float32, from aligned and from odd addresses.
#include <bit>
#include <tuple>

#include "tests/gpu/ops_bench.h"
#include "worker/ops/cuda_kernels.h"
#include "worker/ops/cuda_ops.h"

namespace slidedp::ops {
namespace {

using ::testing::HasSubstr;
using testing::StatusIs;

constexpr double kEps = 1e-6;
constexpr double kF32 = 1e-5;
// Of one rounding to BF16, 2^-9, three times over: room for the sums before it.
constexpr double kRounded = 6e-3;
// Rotation adds two values that were rounded twice, and is rounded: up to
// (2 sqrt(2) + 1) 2^-9.
constexpr double kTurned = 8e-3;

class ElementwiseGpuTest
    : public ::testing::TestWithParam<std::tuple<ActDType, bool>> {
 protected:
  void SetUp() override {
    CudaOpsOptions options;
    options.activation = dtype();
    options.deterministic = true;
    ASSERT_OK_AND_ASSIGN(gpu_, CudaOps::Create(bench_.device(), options));
  }

  ActDType dtype() const { return std::get<0>(GetParam()); }
  // Elements by which operands lie off an aligned address.
  size_t shift() const { return std::get<1>(GetParam()) ? 1 : 0; }
  double Tolerance(double bf16_bound) const {
    return dtype() == ActDType::kF32 ? kF32 : bf16_bound;
  }

  template <typename T>
  T* Put(std::vector<T> x) {
    x.insert(x.begin(), shift(), T{});
    if (x.empty()) x.push_back(T{});
    return bench_.Upload(x) + shift();
  }
  Act PutAct(const Floats& x) {
    if (dtype() == ActDType::kF32) return Put(x);
    return Put(Rounded(x));
  }
  template <typename T>
  std::vector<T> Get(const T* x, size_t count) {
    return bench_.Download(x, count);
  }
  Floats GetAct(ConstAct x, size_t count) {
    return bench_.DownloadAct(x, count, dtype());
  }
  // What the device will hold.
  Floats Random(size_t count, uint32_t seed, double scale = 1) const {
    return OnDevice(RandomFloats(count, seed, scale), dtype());
  }

  Stream& stream() { return bench_.stream(); }
  void Run(const absl::Status& enqueued) {
    ASSERT_OK(enqueued);
    ASSERT_OK(bench_.device().Synchronize(stream()));
  }

  void CheckRmsNorm(int64_t tokens, int64_t hidden, bool add);
  void CheckRope(const AttentionShape& s, bool q, bool k);
  void CheckSwiGlu(int64_t tokens, int64_t inner);
  void CheckEmbedding(int64_t tokens, int64_t hidden, int32_t vocab);
  void CheckCrossEntropy(int64_t rows, int64_t vocab);

  GpuBench bench_;
  OpsBench cpu_;
  std::unique_ptr<CudaOps> gpu_;
};

INSTANTIATE_TEST_SUITE_P(
    Modes, ElementwiseGpuTest,
    ::testing::Combine(::testing::Values(ActDType::kBf16, ActDType::kF32),
                       ::testing::Bool()),
    [](const auto& info) {
      return std::string(std::get<0>(info.param) == ActDType::kF32 ? "F32"
                                                                   : "Bf16") +
             (std::get<1>(info.param) ? "Unaligned" : "");
    });

void ElementwiseGpuTest::CheckRmsNorm(int64_t tokens, int64_t hidden,
                                      bool add) {
  SCOPED_TRACE(absl::StrCat(tokens, " x ", hidden, add ? ", add" : ""));
  const int64_t count = tokens * hidden;
  const Floats x = Random(count, 1), d_out = Random(count, 2);
  const Bf16s w = RandomBf16s(hidden, 3, 1, 0.3);
  Floats want(count, kNaN), want_rstd(tokens, kNaN);
  cpu_.Run(cpu_->RmsNormForward(x.data(), w.data(), tokens, hidden, kEps,
                                want.data(), want_rstd.data(), cpu_.stream()));
  Act x_there = PutAct(x), out = PutAct(Floats(count, kNaN));
  const bf16* w_there = Put(w);
  float* rstd = Put(Floats(tokens, kNaN));
  Run(gpu_->RmsNormForward(x_there, w_there, tokens, hidden, kEps, out, rstd,
                           stream()));
  EXPECT_LT(RelativeError(GetAct(out, count), Wide(want)), Tolerance(kRounded));
  EXPECT_LT(RelativeError(Get(rstd, tokens), Wide(want_rstd)), kF32);

  Floats want_d_x = add ? Random(count, 4) : Floats(count, kNaN);
  Floats want_d_w = RandomFloats(hidden, 5);
  Act d_x = PutAct(want_d_x);
  float* d_w = Put(want_d_w);
  cpu_.Run(cpu_->RmsNormBackward(
      x.data(), w.data(), want_rstd.data(), d_out.data(), tokens, hidden, add,
      want_d_x.data(), want_d_w.data(), nullptr, cpu_.stream()));
  Act d_there = PutAct(d_out);
  Run(gpu_->RmsNormBackward(x_there, w_there, rstd, d_there, tokens, hidden,
                            add, d_x, d_w, /*normed=*/d_there, stream()));
  EXPECT_EQ(GetAct(d_there, count), GetAct(out, count)) << "normed, in place";
  EXPECT_LT(RelativeError(GetAct(d_x, count), Wide(want_d_x)),
            Tolerance(kRounded));
  EXPECT_LT(RelativeError(Get(d_w, hidden), Wide(want_d_w)),
            Tolerance(kRounded));
}

TEST_P(ElementwiseGpuTest, RmsNormMatchesTheCpu) {
  // One to four vectors a thread, and more; the last two have more rows than a
  // gradient has parts.
  constexpr std::pair<int64_t, int64_t> kSizes[] = {
      {1, 40},   {127, 40}, {1, 77},   {5, 3},    {17, 577},  {3, 2048},
      {3, 4096}, {3, 5120}, {2, 8192}, {2, 9000}, {1100, 96}, {1057, 33}};
  for (const auto& [tokens, hidden] : kSizes) {
    CheckRmsNorm(tokens, hidden, /*add=*/false);
    CheckRmsNorm(tokens, hidden, /*add=*/true);
  }
}

TEST_P(ElementwiseGpuTest, RmsNormGradientMayReplaceWhatItComesFrom) {
  const int64_t tokens = 127, hidden = 40, count = tokens * hidden;
  Act x = PutAct(Random(count, 1));
  const bf16* w = Put(RandomBf16s(hidden, 2, 1, 0.3));
  float* rstd = Put(Floats(tokens, 0.7f));
  Act d_out = PutAct(Random(count, 3)), d_x = PutAct(Floats(count, kNaN));
  float *d_w = Put(Floats(hidden)), *again = Put(Floats(hidden));
  Run(gpu_->RmsNormBackward(x, w, rstd, d_out, tokens, hidden, false, d_x, d_w,
                            nullptr, stream()));
  Run(gpu_->RmsNormBackward(x, w, rstd, d_out, tokens, hidden, false, d_out,
                            again, nullptr, stream()));
  EXPECT_EQ(GetAct(d_out, count), GetAct(d_x, count));
  EXPECT_EQ(Get(again, hidden), Get(d_w, hidden));
}

TEST_P(ElementwiseGpuTest, RmsNormOfZerosIsZero) {
  const int64_t hidden = 40;
  Act x = PutAct(Floats(hidden, 0)), out = PutAct(Floats(hidden, kNaN));
  float* rstd = Put(Floats(1, kNaN));
  Run(gpu_->RmsNormForward(x, Put(RandomBf16s(hidden, 1)), 1, hidden, 0.0625,
                           out, rstd, stream()));
  EXPECT_EQ(GetAct(out, hidden), Floats(hidden, 0));
  EXPECT_FLOAT_EQ(Get(rstd, 1)[0], 4);
}

void ElementwiseGpuTest::CheckRope(const AttentionShape& s, bool q, bool k) {
  SCOPED_TRACE(absl::StrCat(s.batch, " x ", s.sequence, ", ", s.heads, "/",
                            s.kv_heads, " heads of ", s.head_dim,
                            q ? ", q norm" : "", k ? ", k norm" : ""));
  const int64_t d = s.head_dim, count = s.tokens() * s.qkv_dim();
  const int64_t stats = s.tokens() * (s.heads + s.kv_heads);
  const Floats qkv = Random(count, 1);
  const Bf16s q_norm = RandomBf16s(d, 2, 1, 0.3);
  const Bf16s k_norm = RandomBf16s(d, 3, 1, 0.3);
  Floats frequencies(d / 2);
  for (int64_t i = 0; i < d / 2; ++i) {
    frequencies[i] = static_cast<float>(std::pow(10000.0, -2.0 * i / d));
  }
  Floats want(count, kNaN), want_rstd(stats, 0);
  cpu_.Run(cpu_->QkNormRopeForward(qkv.data(), q ? q_norm.data() : nullptr,
                                   k ? k_norm.data() : nullptr, kEps,
                                   frequencies.data(), s, want.data(),
                                   want_rstd.data(), cpu_.stream()));
  Act qkv_there = PutAct(qkv), out = PutAct(Floats(count, kNaN));
  const bf16* q_there = q ? Put(q_norm) : nullptr;
  const bf16* k_there = k ? Put(k_norm) : nullptr;
  const float* angles = Put(frequencies);
  float* rstd = Put(Floats(stats, 0));
  Run(gpu_->QkNormRopeForward(qkv_there, q_there, k_there, kEps, angles, s, out,
                              rstd, stream()));
  const Floats turned = GetAct(out, count);
  EXPECT_LT(RelativeError(turned, Wide(want)), Tolerance(kTurned));
  EXPECT_LT(RelativeError(Get(rstd, stats), Wide(want_rstd)), kF32);
  const int64_t v = (s.heads + s.kv_heads) * d;
  for (int64_t t = 0; t < s.tokens(); ++t) {
    for (int64_t i = t * s.qkv_dim() + v; i < (t + 1) * s.qkv_dim(); ++i) {
      ASSERT_EQ(turned[i], qkv[i]);
    }
  }

  Floats want_d = Random(count, 4);
  Floats want_q = RandomFloats(d, 5), want_k = RandomFloats(d, 6);
  Act d_qkv = PutAct(want_d);
  float *d_q = Put(want_q), *d_k = Put(want_k);
  cpu_.Run(cpu_->QkNormRopeBackward(
      qkv.data(), q ? q_norm.data() : nullptr, k ? k_norm.data() : nullptr,
      frequencies.data(), s, want_rstd.data(), want_d.data(), want_q.data(),
      want_k.data(), cpu_.stream()));
  Run(gpu_->QkNormRopeBackward(qkv_there, q_there, k_there, angles, s, rstd,
                               d_qkv, d_q, d_k, stream()));
  EXPECT_LT(RelativeError(GetAct(d_qkv, count), Wide(want_d)),
            Tolerance(kRounded));
  EXPECT_LT(RelativeError(Get(d_q, d), Wide(want_q)), Tolerance(kRounded));
  EXPECT_LT(RelativeError(Get(d_k, d), Wide(want_k)), Tolerance(kRounded));

  Run(gpu_->QkNormRopeForward(qkv_there, q_there, k_there, kEps, angles, s,
                              qkv_there, rstd, stream()));
  EXPECT_EQ(GetAct(qkv_there, count), turned) << "in place";
}

TEST_P(ElementwiseGpuTest, QkNormAndRopeMatchTheCpu) {
  // One token; halves that are no vectors; more tokens than a gradient has
  // parts; more heads than groups of lanes; far positions.
  constexpr AttentionShape kShapes[] = {
      {1, 1, 3, 1, 40, 0},    {1, 127, 3, 1, 16, 8},  {1, 127, 3, 1, 24, 0},
      {2, 65, 4, 2, 64, 0},   {2, 37, 40, 8, 128, 0}, {3, 9, 2, 2, 2, 0},
      {1, 5, 2, 1, 512, 0},   {1, 600, 3, 1, 128, 0}, {2, 3, 64, 8, 256, 0},
      {1, 40000, 1, 1, 16, 0}};
  for (const AttentionShape& shape : kShapes) {
    CheckRope(shape, true, true);
    CheckRope(shape, false, false);
  }
  CheckRope(kShapes[1], true, false);
  CheckRope(kShapes[3], false, true);
}

TEST_P(ElementwiseGpuTest, PositionsRestartWithEachDocument) {
  const std::vector<int32_t> lengths = {5, 1, 94, 60, 40};
  std::vector<int32_t> first_row;
  for (const int32_t length : lengths) {
    first_row.insert(first_row.end(), length,
                     static_cast<int32_t>(first_row.size()));
  }
  AttentionShape here = {2, 100, 3, 1, 64, 0};
  ASSERT_EQ(here.tokens(), static_cast<int64_t>(first_row.size()));
  const int64_t d = here.head_dim, count = here.tokens() * here.qkv_dim();
  AttentionShape there = here;
  here.documents.first_row = first_row.data();
  there.documents.first_row = bench_.Upload(first_row);
  const Floats qkv = Random(count, 1);
  const Bf16s norm = RandomBf16s(d, 2, 1, 0.3);
  Floats frequencies(d / 2, 0.25f), want(count, kNaN),
      want_d = Random(count, 3);
  Floats rstd(here.tokens() * 4), d_q(d), d_k(d);
  const bf16* norm_there = Put(norm);
  const float* frequencies_there = Put(frequencies);
  Act qkv_there = PutAct(qkv), out = PutAct(Floats(count, kNaN));
  Act d_there = PutAct(want_d);
  float *rstd_there = Put(rstd), *d_q_there = Put(d_q), *d_k_there = Put(d_k);
  cpu_.Run(cpu_->QkNormRopeForward(qkv.data(), norm.data(), norm.data(), kEps,
                                   frequencies.data(), here, want.data(),
                                   rstd.data(), cpu_.stream()));
  cpu_.Run(cpu_->QkNormRopeBackward(
      qkv.data(), norm.data(), norm.data(), frequencies.data(), here,
      rstd.data(), want_d.data(), d_q.data(), d_k.data(), cpu_.stream()));
  Run(gpu_->QkNormRopeForward(qkv_there, norm_there, norm_there, kEps,
                              frequencies_there, there, out, rstd_there,
                              stream()));
  Run(gpu_->QkNormRopeBackward(qkv_there, norm_there, norm_there,
                               frequencies_there, there, rstd_there, d_there,
                               d_q_there, d_k_there, stream()));
  EXPECT_LT(RelativeError(GetAct(out, count), Wide(want)), Tolerance(kTurned));
  EXPECT_LT(RelativeError(GetAct(d_there, count), Wide(want_d)),
            Tolerance(kRounded));
}

void ElementwiseGpuTest::CheckSwiGlu(int64_t tokens, int64_t inner) {
  SCOPED_TRACE(absl::StrCat(tokens, " x ", inner));
  const int64_t count = tokens * inner;
  const Floats gate_up = Random(2 * count, 1, 3), d_out = Random(count, 2);
  Floats want(count, kNaN), want_d(2 * count, kNaN);
  cpu_.Run(cpu_->SwiGluForward(gate_up.data(), tokens, inner, want.data(),
                               cpu_.stream()));
  cpu_.Run(cpu_->SwiGluBackward(gate_up.data(), d_out.data(), tokens, inner,
                                want_d.data(), nullptr, cpu_.stream()));
  Act there = PutAct(gate_up), out = PutAct(Floats(count, kNaN));
  Act d_there = PutAct(d_out), d = PutAct(Floats(2 * count, kNaN));
  Run(gpu_->SwiGluForward(there, tokens, inner, out, stream()));
  Run(gpu_->SwiGluBackward(there, d_there, tokens, inner, d, nullptr,
                           stream()));
  EXPECT_LT(RelativeError(GetAct(out, count), Wide(want)), Tolerance(kRounded));
  const Floats gradient = GetAct(d, 2 * count);
  EXPECT_LT(RelativeError(gradient, Wide(want_d)), Tolerance(kRounded));
  Run(gpu_->SwiGluBackward(there, d_there, tokens, inner, there, d_there,
                           stream()));
  EXPECT_EQ(GetAct(there, 2 * count), gradient) << "in place";
  EXPECT_EQ(GetAct(d_there, count), GetAct(out, count)) << "in place";
}

TEST_P(ElementwiseGpuTest, SwiGluMatchesTheCpu) {
  CheckSwiGlu(1, 1);
  CheckSwiGlu(1, 40);
  CheckSwiGlu(127, 77);
  CheckSwiGlu(16, 4864);
  CheckSwiGlu(70000, 8);  // more rows than a grid has
}

TEST_P(ElementwiseGpuTest, SwiGluOfExtremeGatesIsFinite) {
  const Floats gates =
      OnDevice({-3e38f, -200, -88.5f, 0, 30, 200, 1e30f, 5}, dtype());
  const auto n = static_cast<int64_t>(gates.size());
  Floats gate_up = gates;
  gate_up.insert(gate_up.end(), n, 1.0f);
  Act there = PutAct(gate_up), out = PutAct(Floats(n, kNaN));
  Act d = PutAct(Floats(2 * n, kNaN));
  Run(gpu_->SwiGluForward(there, 1, n, out, stream()));
  Run(gpu_->SwiGluBackward(there, PutAct(Floats(n, 1)), 1, n, d, nullptr,
                           stream()));
  const Floats y = GetAct(out, n), d_y = GetAct(d, 2 * n);
  for (int64_t i = 0; i < n; ++i) {
    const double g = gates[i], silu = g < -700 ? 0 : g / (1 + std::exp(-g));
    EXPECT_NEAR(y[i], silu, std::abs(silu) * Tolerance(kRounded) + 1e-35) << g;
    EXPECT_TRUE(std::isfinite(d_y[i])) << g;
    EXPECT_EQ(d_y[n + i], y[i]) << g;
  }
}

void ElementwiseGpuTest::CheckEmbedding(int64_t tokens, int64_t hidden,
                                        int32_t vocab) {
  SCOPED_TRACE(absl::StrCat(tokens, " tokens x ", hidden, " of ", vocab));
  const auto ids = RandomIds(tokens, vocab, 1);
  const Bf16s table = RandomBf16s(vocab * hidden, 2);
  const Floats d_out = Random(tokens * hidden, 3);
  const int32_t* ids_there = Put(ids);
  Act out = PutAct(Floats(tokens * hidden, kNaN));
  Run(gpu_->EmbeddingForward(ids_there, Put(table), tokens, hidden, out,
                             stream()));
  Floats want(tokens * hidden, kNaN);
  cpu_.Run(cpu_->EmbeddingForward(ids.data(), table.data(), tokens, hidden,
                                  want.data(), cpu_.stream()));
  EXPECT_EQ(GetAct(out, want.size()), want);

  Floats want_d = RandomFloats(vocab * hidden, 4);
  float* d_table = Put(want_d);
  cpu_.Run(cpu_->EmbeddingBackward(ids.data(), d_out.data(), tokens, hidden,
                                   vocab, want_d.data(), cpu_.stream()));
  Run(gpu_->EmbeddingBackward(ids_there, PutAct(d_out), tokens, hidden, vocab,
                              d_table, stream()));
  // Float32 sums in ascending order: the same bits.
  EXPECT_TRUE(Get(d_table, want_d.size()) == want_d);
}

TEST_P(ElementwiseGpuTest, EmbeddingIsExactlyTheCpus) {
  CheckEmbedding(1, 40, 77);
  CheckEmbedding(127, 3, 1);
  CheckEmbedding(127, 40, 5);
  CheckEmbedding(1025, 33, 257);
  CheckEmbedding(5000, 8, 151936);
  CheckEmbedding(70001, 16, 900);
}

void ElementwiseGpuTest::CheckCrossEntropy(int64_t rows, int64_t vocab) {
  SCOPED_TRACE(absl::StrCat(rows, " x ", vocab));
  const float scale = 1.0f / 64;
  Floats want = Random(rows * vocab, 1, 4);
  auto labels = RandomIds(rows, static_cast<int32_t>(vocab), 2);
  for (int64_t t = 1; t < rows; t += 3) labels[t] = -1;
  Act logits = PutAct(want);
  double want_loss = 5;
  cpu_.Run(cpu_->CrossEntropy(want.data(), labels.data(), rows, vocab, scale,
                              &want_loss, cpu_.stream()));
  double* loss = bench_.Upload(std::vector<double>{5});
  Run(gpu_->CrossEntropy(logits, Put(labels), rows, vocab, scale, loss,
                         stream()));
  EXPECT_NEAR(Get(loss, 1)[0], want_loss, 1e-5 * want_loss);
  const Floats gradient = GetAct(logits, want.size());
  EXPECT_LT(RelativeError(gradient, Wide(want)), Tolerance(kRounded));
  for (int64_t i = vocab; rows > 1 && i < 2 * vocab; ++i) {
    ASSERT_EQ(gradient[i], 0) << "row without a label";
  }
}

TEST_P(ElementwiseGpuTest, CrossEntropyMatchesTheCpu) {
  CheckCrossEntropy(1, 77);
  CheckCrossEntropy(127, 77);
  CheckCrossEntropy(2, 1);
  CheckCrossEntropy(1500, 40);  // more rows than the sum has threads
  CheckCrossEntropy(1, 151936);
  CheckCrossEntropy(4, 151936);
}

TEST_P(ElementwiseGpuTest, CrossEntropyKeepsWhatIsNotANumber) {
  const int64_t vocab = 2056;
  for (const float bad : {kNaN, INFINITY}) {
    Floats logits(vocab, 1);
    logits[1030] = bad;
    Act there = PutAct(logits);
    double* loss = bench_.Upload(std::vector<double>{0});
    Run(gpu_->CrossEntropy(there, Put(std::vector<int32_t>{3}), 1, vocab, 1,
                           loss, stream()));
    EXPECT_FALSE(std::isfinite(Get(loss, 1)[0])) << bad;
    EXPECT_TRUE(std::isnan(GetAct(there, vocab)[1030])) << bad;
  }
  // A logit of -infinity is a probability of 0, no fault.
  Floats logits(vocab, -INFINITY);
  logits[7] = 3;
  Act there = PutAct(logits);
  double* loss = bench_.Upload(std::vector<double>{0});
  Run(gpu_->CrossEntropy(there, Put(std::vector<int32_t>{7}), 1, vocab, 1, loss,
                         stream()));
  EXPECT_EQ(Get(loss, 1)[0], 0);
  EXPECT_EQ(GetAct(there, vocab), Floats(vocab, 0));
}

TEST_P(ElementwiseGpuTest, CastRoundsToNearestEven) {
  std::mt19937 random(1);
  Floats x = {0.0f, -0.0f, INFINITY, -INFINITY, 3.4e38f, 1e-42f, 1.00390625f};
  while (x.size() < 70001) {
    x.push_back(std::bit_cast<float>(static_cast<uint32_t>(random())));
  }
  x.push_back(kNaN);
  x.push_back(std::bit_cast<float>(0x7f800001u));  // NaN in the low half only
  for (const size_t count : {x.size(), size_t{1}, size_t{7}, size_t{8}}) {
    const float* there = Put(Floats(x.begin(), x.begin() + count));
    bf16* out = Put(Bf16s(count, 0));
    Run(gpu_->CastToBf16(there, static_cast<int64_t>(count), out, stream()));
    const Bf16s got = Get(out, count);
    for (size_t i = 0; i < count; ++i) {
      if (std::isnan(x[i])) {
        ASSERT_TRUE(std::isnan(Bf16ToFloat(got[i]))) << i;
      } else {
        ASSERT_EQ(got[i], FloatToBf16Even(x[i])) << i;
      }
    }
  }
}

TEST_P(ElementwiseGpuTest, SquaredNormIsOfFloat64AndOverwrites) {
  double* norm = bench_.Upload(std::vector<double>{kNaN});
  for (const int64_t count : {0, 1, 31, 65536, 200001, 3000001}) {
    const Bf16s x = RandomBf16s(count, 1);
    double want = 0;
    cpu_.Run(cpu_->SquaredNorm(x.data(), count, &want, cpu_.stream()));
    Run(gpu_->SquaredNorm(Put(x), count, norm, stream()));
    const double got = Get(norm, 1)[0];
    EXPECT_NEAR(got, want, want * 1e-12) << count;
    // Wherever it lies.
    if (count == 0) continue;
    Run(gpu_->SquaredNorm(bench_.Upload(x), count, norm, stream()));
    EXPECT_EQ(Get(norm, 1)[0], got) << count;
  }
  const Bf16s large(9, FloatToBf16Even(1e38f));
  const double value = Bf16ToFloat(large[0]);
  Run(gpu_->SquaredNorm(Put(large), 9, norm, stream()));
  EXPECT_DOUBLE_EQ(Get(norm, 1)[0], 9 * value * value);
  Run(gpu_->SquaredNorm(Put(Bf16s{0, 0x7fc0}), 2, norm, stream()));
  EXPECT_TRUE(std::isnan(Get(norm, 1)[0]));
}

TEST_P(ElementwiseGpuTest, RepeatedRunsGiveTheSameBits) {
  const int64_t tokens = 4097, hidden = 256, vocab = 300;
  const AttentionShape shape = {1, tokens, 3, 1, 64, 0};
  const int64_t count = tokens * hidden, fused = tokens * shape.qkv_dim();
  const Floats x = Random(count, 1), d_out = Random(count, 2);
  const Floats qkv = Random(fused, 3), logits = Random(tokens * vocab, 4, 4);
  Act x_there = PutAct(x), d_there = PutAct(d_out), qkv_there = PutAct(qkv);
  const bf16* w = Put(RandomBf16s(hidden, 5, 1, 0.3));
  const int32_t* ids = Put(RandomIds(tokens, vocab, 6));
  const float* frequencies = Put(Floats(32, 0.01f));
  const float* rstd = Put(Floats(tokens * 4, 0.9f));
  std::vector<Floats> first;
  double first_loss = 0;
  for (int run = 0; run < 3; ++run) {
    Act d_x = PutAct(Floats(count, kNaN)), d_qkv = PutAct(qkv);
    Act soft = PutAct(logits);
    float *d_w = Put(Floats(hidden)), *d_table = Put(Floats(vocab * hidden));
    float *d_q = Put(Floats(64)), *d_k = Put(Floats(64));
    double* loss = bench_.Upload(std::vector<double>{0});
    Run(gpu_->RmsNormBackward(x_there, w, rstd, d_there, tokens, hidden, false,
                              d_x, d_w, nullptr, stream()));
    Run(gpu_->QkNormRopeBackward(qkv_there, w, w, frequencies, shape, rstd,
                                 d_qkv, d_q, d_k, stream()));
    Run(gpu_->EmbeddingBackward(ids, d_there, tokens, hidden, vocab, d_table,
                                stream()));
    Run(gpu_->CrossEntropy(soft, ids, tokens, vocab, 0.1f, loss, stream()));
    const std::vector<Floats> all = {GetAct(d_x, count),
                                     Get(d_w, hidden),
                                     GetAct(d_qkv, fused),
                                     Get(d_q, 64),
                                     Get(d_k, 64),
                                     Get(d_table, vocab * hidden),
                                     GetAct(soft, tokens * vocab)};
    const double sum = Get(loss, 1)[0];
    if (run == 0) {
      first = all;
      first_loss = sum;
    }
    for (size_t i = 0; i < all.size(); ++i) {
      EXPECT_TRUE(all[i] == first[i]) << "result " << i;
    }
    EXPECT_EQ(sum, first_loss);
  }
  EXPECT_TRUE(std::isfinite(first_loss));
}

TEST_P(ElementwiseGpuTest, NothingToDoLeavesEverythingAsItIs) {
  EXPECT_OK(gpu_->EmbeddingForward(nullptr, nullptr, 0, 8, nullptr, stream()));
  EXPECT_OK(
      gpu_->EmbeddingBackward(nullptr, nullptr, 0, 8, 9, nullptr, stream()));
  EXPECT_OK(gpu_->RmsNormForward(nullptr, nullptr, 0, 8, kEps, nullptr, nullptr,
                                 stream()));
  EXPECT_OK(gpu_->RmsNormBackward(nullptr, nullptr, nullptr, nullptr, 0, 8,
                                  false, nullptr, nullptr, nullptr, stream()));
  EXPECT_OK(gpu_->SwiGluForward(nullptr, 0, 8, nullptr, stream()));
  EXPECT_OK(
      gpu_->SwiGluBackward(nullptr, nullptr, 0, 8, nullptr, nullptr, stream()));
  EXPECT_OK(gpu_->CrossEntropy(nullptr, nullptr, 0, 8, 1, nullptr, stream()));
  EXPECT_OK(gpu_->CastToBf16(nullptr, 0, nullptr, stream()));
  EXPECT_OK(bench_.device().Synchronize(stream()));
}

TEST_P(ElementwiseGpuTest, AfterWarmUpNothingIsAllocated) {
  gpu_->BeginWarmUp();
  CheckCrossEntropy(127, 77);
  gpu_->EndWarmUp();
  CheckCrossEntropy(127, 77);
  const int64_t rows = int64_t{1} << 20;
  const size_t allocated = bench_.device().allocated_bytes();
  EXPECT_THAT(
      gpu_->CrossEntropy(nullptr, nullptr, rows, 77, 1, nullptr, stream()),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("warm-up")));
  EXPECT_EQ(bench_.device().allocated_bytes(), allocated);
}

TEST_P(ElementwiseGpuTest, ShapesBeyondTheKernelsAreRefused) {
  EXPECT_THAT(
      gpu_->RmsNormBackward(nullptr, nullptr, nullptr, nullptr, 1,
                            kMaxNormHidden + 1, false, nullptr, nullptr,
                            nullptr, stream()),
      StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("hidden size")));
  EXPECT_THAT(gpu_->QkNormRopeForward(nullptr, nullptr, nullptr, kEps, nullptr,
                                      {1, 1, 1, 1, kMaxRopeHeadDim + 2, 0},
                                      nullptr, nullptr, stream()),
              StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("rope")));
}

}  // namespace
}  // namespace slidedp::ops
