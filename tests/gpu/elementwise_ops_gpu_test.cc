// Embedding, cross-entropy, cast, squared norm, and what all ops share.
#include <algorithm>
#include <bit>
#include <cstdlib>
#include <memory>
#include <random>

#include "tests/gpu/elementwise_gpu_test.h"
#include "worker/ops/cuda_kernels.h"

namespace slidedp::ops {
namespace {

using ::testing::HasSubstr;
using testing::StatusIs;

INSTANTIATE_TEST_SUITE_P(
    Modes, ElementwiseGpuTest,
    ::testing::Combine(::testing::Values(ActDType::kBf16, ActDType::kF32),
                       ::testing::Bool()),
    [](const auto& info) {
      return std::string(std::get<0>(info.param) == ActDType::kF32 ? "F32"
                                                                   : "Bf16") +
             (std::get<1>(info.param) ? "Unaligned" : "");
    });

}  // namespace

void ElementwiseGpuTest::CheckEmbedding(int64_t tokens, int64_t hidden,
                                        int32_t vocab) {
  SCOPED_TRACE(absl::StrCat(tokens, " tokens x ", hidden, " of ", vocab));
  const auto ids = RandomIds(tokens, vocab, 1);
  const Bf16s table = RandomBf16s(vocab * hidden, 2);
  const Floats d_out = Random(tokens * hidden, 3);
  const int32_t* ids_there = Put(ids);
  Act out = PutAct(Floats(tokens * hidden, kNaN));
  Run(gpu_->EmbeddingForward(ids_there, Put(table), tokens, hidden, vocab, out,
                             stream()));
  Floats want(tokens * hidden, kNaN);
  cpu_.Run(cpu_->EmbeddingForward(ids.data(), table.data(), tokens, hidden,
                                  vocab, want.data(), cpu_.stream()));
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

// `table` [rows, width] to `out`, host memory that the GPU writes in place,
// from element `begin` to `end`, `out_shift` elements off a page.
void ElementwiseGpuTest::CheckCopyUsedRows(int64_t rows, int64_t width,
                                           int64_t begin, int64_t end,
                                           int64_t out_shift) {
  SCOPED_TRACE(absl::StrCat(rows, " x ", width, ": ", begin, " to ", end,
                            ", out + ", out_shift));
  const int64_t words = (rows + 63) / 64;
  const int sets = 3;
  std::vector<uint64_t> bitmaps(sets * words);
  std::mt19937 random(1);
  for (int64_t row = 0; row < rows; ++row) {
    if (random() % 5 != 0) continue;
    bitmaps[random() % sets * words + row / 64] |= uint64_t{1} << (row % 64);
  }
  const Bf16s table = RandomBf16s(rows * width, 2);
  const int64_t count = end - begin;
  Bf16s want(count, 0x7fff);
  cpu_.Run(cpu_->CopyUsedRows({bitmaps.data(), words, sets}, width, begin,
                              count, table.data() + begin, want.data(),
                              cpu_.stream()));

  const size_t page = 4096;
  const size_t bytes =
      ((out_shift + count) * sizeof(bf16) + page - 1) / page * page + page;
  const std::unique_ptr<bf16, void (*)(void*)> memory(
      static_cast<bf16*>(std::aligned_alloc(page, bytes)), &std::free);
  std::fill_n(memory.get(), bytes / sizeof(bf16), bf16{0x7fff});
  ASSERT_OK_AND_ASSIGN(auto registration,
                       bench_.device().RegisterHost(memory.get(), bytes,
                                                    /*read_only=*/false));
  bf16* out = memory.get() + out_shift;
  Run(gpu_->CopyUsedRows({bench_.Upload(bitmaps), words, sets}, width, begin,
                         count, Put(table) + begin, out, stream()));
  EXPECT_TRUE(Bf16s(out, out + count) == want);
  // Nothing beside it.
  EXPECT_TRUE(out_shift == 0 || out[-1] == 0x7fff);
  EXPECT_EQ(out[count], 0x7fff);
}

TEST_P(ElementwiseGpuTest, CopyOfUsedRowsIsExactlyTheCpus) {
  for (int64_t width : {1, 7, 40, 4096}) {
    const int64_t rows = 200;
    CheckCopyUsedRows(rows, width, 0, rows * width, 0);
    CheckCopyUsedRows(rows, width, width / 2, 131 * width + width / 3, 0);
    CheckCopyUsedRows(rows, width, 8 * width, 99 * width, 8);
    CheckCopyUsedRows(rows, width, 3 * width, 3 * width + (width + 1) / 2, 5);
  }
  CheckCopyUsedRows(151936, 64, 0, int64_t{151936} * 64, 0);
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
  EXPECT_OK(
      gpu_->EmbeddingForward(nullptr, nullptr, 0, 8, 8, nullptr, stream()));
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
  EXPECT_OK(gpu_->CopyUsedRows({nullptr, 0, 1}, 8, 16, 0, nullptr, nullptr,
                               stream()));
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

}  // namespace slidedp::ops
