// RMS norm, QK-norm with rope, and SwiGLU.
#include "tests/gpu/elementwise_gpu_test.h"

namespace slidedp::ops {

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

}  // namespace slidedp::ops
