// Linear layers on the GPU against float64.
#include <tuple>

#include "tests/gpu/ops_bench.h"
#include "worker/ops/linear_cuda.h"

namespace slidedp::ops {
namespace {

using ::testing::HasSubstr;
using testing::StatusIs;

struct Size {
  int64_t tokens, in, out;
};
// One token; nothing a multiple of 8; just over a tile; more than one wave.
constexpr Size kSizes[] = {{1, 64, 64},     {1, 1000, 151},  {3, 5, 7},
                           {127, 72, 40},   {128, 256, 384}, {33, 101, 77},
                           {4097, 96, 200}, {257, 512, 768}};

// Float32 sums of products of BF16 values, of which rounding to BF16 is the
// largest error.
double Tolerance(ActDType dtype) {
  return dtype == ActDType::kF32 ? 1e-5 : 6e-3;
}
// Weight gradients are never rounded to BF16.
constexpr double kF32Tolerance = 2e-5;

class LinearGpuTest
    : public ::testing::TestWithParam<std::tuple<ActDType, bool>> {
 protected:
  void SetUp() override {
    ASSERT_OK_AND_ASSIGN(linear_,
                         CudaLinear::Create(bench_.device(), bench_.workspace(),
                                            dtype(), std::get<1>(GetParam())));
  }
  ActDType dtype() const { return std::get<0>(GetParam()); }

  void CheckForward(const Size& s, bool bias, bool add);
  void CheckBackwardInput(const Size& s, bool add);
  void CheckBackwardWeight(const Size& s, bool bias, bool add);

  GpuBench bench_;
  std::unique_ptr<CudaLinear> linear_;
};

INSTANTIATE_TEST_SUITE_P(
    Modes, LinearGpuTest,
    ::testing::Combine(::testing::Values(ActDType::kBf16, ActDType::kF32),
                       ::testing::Bool()),
    [](const auto& info) {
      return std::string(std::get<0>(info.param) == ActDType::kF32 ? "F32"
                                                                   : "Bf16") +
             (std::get<1>(info.param) ? "Deterministic" : "");
    });

void LinearGpuTest::CheckForward(const Size& s, bool bias, bool add) {
  SCOPED_TRACE(absl::StrCat(s.tokens, " x ", s.in, " x ", s.out,
                            bias ? ", bias" : "", add ? ", add" : ""));
  const Floats x = OnDevice(RandomFloats(s.tokens * s.in, 1), dtype());
  const Bf16s w = RandomBf16s(s.out * s.in, 2);
  const Bf16s b = bias ? RandomBf16s(s.out, 3) : Bf16s();
  const Floats y = add ? OnDevice(RandomFloats(s.tokens * s.out, 4), dtype())
                       : Floats(s.tokens * s.out, kNaN);
  Act d_y = bench_.UploadAct(y, dtype());
  ASSERT_OK(linear_->Forward(bench_.UploadAct(x, dtype()), bench_.Upload(w),
                             bias ? bench_.Upload(b) : nullptr, s.tokens, s.in,
                             s.out, add ? d_y : nullptr, d_y, bench_.stream()));
  ASSERT_OK(bench_.device().Synchronize(bench_.stream()));
  Vec want =
      reference::Linear(Wide(x), Wide(w), Wide(b), s.tokens, s.in, s.out);
  if (add) want = Plus(want, y);
  EXPECT_LT(RelativeError(bench_.DownloadAct(d_y, y.size(), dtype()), want),
            Tolerance(dtype()));
  if (!add) return;
  // The same from elsewhere.
  Act residual = bench_.UploadAct(y, dtype());
  Act apart = bench_.UploadAct(Floats(y.size(), kNaN), dtype());
  ASSERT_OK(linear_->Forward(bench_.UploadAct(x, dtype()), bench_.Upload(w),
                             bias ? bench_.Upload(b) : nullptr, s.tokens, s.in,
                             s.out, residual, apart, bench_.stream()));
  ASSERT_OK(bench_.device().Synchronize(bench_.stream()));
  EXPECT_LT(RelativeError(bench_.DownloadAct(apart, y.size(), dtype()), want),
            Tolerance(dtype()));
  EXPECT_EQ(bench_.DownloadAct(residual, y.size(), dtype()), y);
}

void LinearGpuTest::CheckBackwardInput(const Size& s, bool add) {
  SCOPED_TRACE(
      absl::StrCat(s.tokens, " x ", s.in, " x ", s.out, add ? ", add" : ""));
  const Floats d_y = OnDevice(RandomFloats(s.tokens * s.out, 5), dtype());
  const Bf16s w = RandomBf16s(s.out * s.in, 6);
  const Floats before =
      add ? OnDevice(RandomFloats(s.tokens * s.in, 7), dtype())
          : Floats(s.tokens * s.in, kNaN);
  Act d_x = bench_.UploadAct(before, dtype());
  ASSERT_OK(linear_->BackwardInput(bench_.UploadAct(d_y, dtype()),
                                   bench_.Upload(w), s.tokens, s.in, s.out, add,
                                   d_x, bench_.stream()));
  ASSERT_OK(bench_.device().Synchronize(bench_.stream()));
  Vec want, d_w, d_b;
  reference::LinearBackward(Vec(s.tokens * s.in), Wide(w), Wide(d_y), s.tokens,
                            s.in, s.out, want, d_w, d_b);
  if (add) want = Plus(want, before);
  EXPECT_LT(
      RelativeError(bench_.DownloadAct(d_x, before.size(), dtype()), want),
      Tolerance(dtype()));
}

void LinearGpuTest::CheckBackwardWeight(const Size& s, bool bias, bool add) {
  SCOPED_TRACE(absl::StrCat(s.tokens, " x ", s.in, " x ", s.out,
                            bias ? ", bias" : "", add ? ", add" : ""));
  const Floats x = OnDevice(RandomFloats(s.tokens * s.in, 8), dtype());
  const Floats d_y = OnDevice(RandomFloats(s.tokens * s.out, 9), dtype());
  const Floats w_before =
      add ? RandomFloats(s.out * s.in, 10) : Floats(s.out * s.in, kNaN);
  const Floats b_before = RandomFloats(s.out, 11);
  float* d_w = bench_.Upload(w_before);
  float* d_b = bench_.Upload(b_before);
  Act x_there = bench_.UploadAct(x, dtype());
  Act d_y_there = bench_.UploadAct(d_y, dtype());
  Vec d_x, w_want, b_want;
  reference::LinearBackward(Wide(x), Vec(s.out * s.in), Wide(d_y), s.tokens,
                            s.in, s.out, d_x, w_want, b_want);
  if (add) w_want = Plus(w_want, w_before);
  b_want = Plus(b_want, b_before);
  ASSERT_OK(linear_->BackwardWeight(x_there, d_y_there, s.tokens, s.in, s.out,
                                    add, d_w, bias ? d_b : nullptr,
                                    bench_.stream()));
  ASSERT_OK(bench_.device().Synchronize(bench_.stream()));
  EXPECT_LT(RelativeError(bench_.Download(d_w, w_before.size()), w_want),
            kF32Tolerance);
  if (bias) {
    EXPECT_LT(RelativeError(bench_.Download(d_b, b_before.size()), b_want),
              kF32Tolerance);
  } else {
    EXPECT_EQ(bench_.Download(d_b, b_before.size()), b_before);
  }
}

TEST_P(LinearGpuTest, ForwardIsTheProduct) {
  for (const Size& s : kSizes) {
    CheckForward(s, /*bias=*/false, /*add=*/false);
    CheckForward(s, /*bias=*/true, /*add=*/false);
    CheckForward(s, /*bias=*/false, /*add=*/true);
    CheckForward(s, /*bias=*/true, /*add=*/true);
  }
}

TEST_P(LinearGpuTest, BackwardInputIsTheProduct) {
  for (const Size& s : kSizes) {
    CheckBackwardInput(s, /*add=*/false);
    CheckBackwardInput(s, /*add=*/true);
  }
}

TEST_P(LinearGpuTest, BackwardWeightWritesOrAddsToTheAccumulator) {
  for (const Size& s : kSizes) {
    for (bool bias : {false, true}) {
      CheckBackwardWeight(s, bias, /*add=*/false);
      CheckBackwardWeight(s, bias, /*add=*/true);
    }
  }
}

TEST_P(LinearGpuTest, NoTokensAddNothing) {
  float* d_w = bench_.Upload(Floats(12, 5));
  EXPECT_OK(linear_->Forward(nullptr, nullptr, nullptr, 0, 3, 4, nullptr,
                             nullptr, bench_.stream()));
  EXPECT_OK(linear_->BackwardInput(nullptr, nullptr, 0, 3, 4, false, nullptr,
                                   bench_.stream()));
  EXPECT_OK(linear_->BackwardWeight(nullptr, nullptr, 0, 3, 4, /*add=*/true,
                                    d_w, nullptr, bench_.stream()));
  EXPECT_EQ(bench_.Download(d_w, 12), Floats(12, 5));
  EXPECT_OK(linear_->BackwardWeight(nullptr, nullptr, 0, 3, 4, /*add=*/false,
                                    d_w, nullptr, bench_.stream()));
  EXPECT_EQ(bench_.Download(d_w, 12), Floats(12, 0));
}

TEST_P(LinearGpuTest, OperandsMayLieAnywhereInTheirBuffers) {
  // One element in: aligned to no vector.
  const Size s = {65, 48, 40};
  const size_t x_count = s.tokens * s.in, y_count = s.tokens * s.out;
  const Floats x = OnDevice(RandomFloats(x_count + 1, 12), dtype());
  const Bf16s w = RandomBf16s(s.out * s.in + 1, 13);
  Act y = bench_.UploadAct(Floats(y_count + 2, 0), dtype());
  const size_t bytes = dtype() == ActDType::kF32 ? 4 : 2;
  const auto shifted = [&](void* p) {
    return static_cast<void*>(static_cast<char*>(p) + bytes);
  };
  ASSERT_OK(linear_->Forward(shifted(bench_.UploadAct(x, dtype())),
                             bench_.Upload(w) + 1, nullptr, s.tokens, s.in,
                             s.out, nullptr, shifted(y), bench_.stream()));
  ASSERT_OK(bench_.device().Synchronize(bench_.stream()));
  const Vec want = reference::Linear(Wide(Floats(x.begin() + 1, x.end())),
                                     Wide(Bf16s(w.begin() + 1, w.end())), {},
                                     s.tokens, s.in, s.out);
  const Floats all = bench_.DownloadAct(y, y_count + 2, dtype());
  EXPECT_EQ(all.front(), 0);
  EXPECT_EQ(all.back(), 0);
  EXPECT_LT(RelativeError(Floats(all.begin() + 1, all.end() - 1), want),
            Tolerance(dtype()));
}

TEST_P(LinearGpuTest, RepeatedRunsGiveTheSameBits) {
  const Size s = {4097, 96, 200};
  Act x = bench_.UploadAct(RandomFloats(s.tokens * s.in, 14), dtype());
  Act d_y = bench_.UploadAct(RandomFloats(s.tokens * s.out, 15), dtype());
  Floats first_w, first_b;
  for (int run = 0; run < 3; ++run) {
    float* d_w = bench_.Upload(Floats(s.out * s.in));
    float* d_b = bench_.Upload(Floats(s.out));
    ASSERT_OK(linear_->BackwardWeight(x, d_y, s.tokens, s.in, s.out,
                                      /*add=*/true, d_w, d_b, bench_.stream()));
    ASSERT_OK(bench_.device().Synchronize(bench_.stream()));
    const Floats w = bench_.Download(d_w, s.out * s.in);
    const Floats b = bench_.Download(d_b, s.out);
    if (run == 0) {
      first_w = w;
      first_b = b;
    }
    EXPECT_EQ(w, first_w);
    EXPECT_EQ(b, first_b);
  }
}

TEST_P(LinearGpuTest, WrittenIsWhatIsAddedToZeros) {
  for (const Size& s : kSizes) {
    SCOPED_TRACE(absl::StrCat(s.tokens, " x ", s.in, " x ", s.out));
    Act x = bench_.UploadAct(RandomFloats(s.tokens * s.in, 18), dtype());
    Act d_y = bench_.UploadAct(RandomFloats(s.tokens * s.out, 19), dtype());
    float* added = bench_.Upload(Floats(s.out * s.in));
    float* written = bench_.Upload(Floats(s.out * s.in, kNaN));
    for (bool add : {false, true}) {
      ASSERT_OK(linear_->BackwardWeight(x, d_y, s.tokens, s.in, s.out, add,
                                        add ? added : written, nullptr,
                                        bench_.stream()));
    }
    ASSERT_OK(bench_.device().Synchronize(bench_.stream()));
    EXPECT_EQ(bench_.Download(written, s.out * s.in),
              bench_.Download(added, s.out * s.in));
  }
}

TEST_P(LinearGpuTest, AfterWarmUpNothingIsPlannedOrAllocated) {
  const Size s = {257, 1024, 1536};
  linear_->set_mode(PlanMode::kTimed);
  Act x = bench_.UploadAct(RandomFloats(s.tokens * s.in, 16), dtype());
  const bf16* w = bench_.Upload(RandomBf16s(s.out * s.in, 17));
  Act y = bench_.UploadAct(Floats(s.tokens * s.out), dtype());
  float* d_w = bench_.Upload(Floats(s.out * s.in));
  float* d_b = bench_.Upload(Floats(s.out));
  ASSERT_OK(linear_->Forward(x, w, nullptr, s.tokens, s.in, s.out, nullptr, y,
                             bench_.stream()));
  ASSERT_OK(linear_->BackwardInput(y, w, s.tokens, s.in, s.out, false, x,
                                   bench_.stream()));
  for (bool add : {false, true}) {
    ASSERT_OK(linear_->BackwardWeight(x, y, s.tokens, s.in, s.out, add, d_w,
                                      d_b, bench_.stream()));
  }
  linear_->set_mode(PlanMode::kFrozen);
  bench_.workspace().Freeze();

  CheckForward(s, /*bias=*/false, /*add=*/false);
  CheckBackwardInput(s, /*add=*/false);
  CheckBackwardWeight(s, /*bias=*/true, /*add=*/false);
  CheckBackwardWeight(s, /*bias=*/true, /*add=*/true);

  const size_t allocated = bench_.device().allocated_bytes();
  EXPECT_THAT(
      linear_->Forward(x, w, nullptr, s.tokens - 1, s.in, s.out, nullptr, y,
                       bench_.stream()),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("warm-up")));
  EXPECT_EQ(bench_.device().allocated_bytes(), allocated);
}

TEST_P(LinearGpuTest, AnotherStreamWaitsForTheWorkspace) {
  // Alternating streams, each result depends on the one before.
  const int64_t n = 512;
  Bf16s twice(n * n, 0);  // y = 2 x
  for (int64_t i = 0; i < n; ++i) twice[i * n + i] = FloatToBf16Even(2);
  const bf16* w = bench_.Upload(twice);
  Act a = bench_.UploadAct(Floats(n * n, 1), dtype());
  Act b = bench_.UploadAct(Floats(n * n, 0), dtype());
  auto other = *bench_.device().NewStream("other");
  auto done = *bench_.device().NewEvent();
  for (int i = 0; i < 10; ++i) {
    Stream& stream = i % 2 == 0 ? bench_.stream() : *other;
    ASSERT_OK(bench_.device().Wait(*done, stream));
    ASSERT_OK(linear_->Forward(i % 2 == 0 ? a : b, w, nullptr, n, n, n, nullptr,
                               i % 2 == 0 ? b : a, stream));
    ASSERT_OK(bench_.device().Record(*done, stream));
  }
  ASSERT_OK(bench_.device().Synchronize(*other));
  EXPECT_EQ(bench_.DownloadAct(a, n * n, dtype()), Floats(n * n, 1024));
}

}  // namespace
}  // namespace slidedp::ops
