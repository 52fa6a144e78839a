// Attention on the GPU, fused and plain, against float64.
#include <tuple>

#include "tests/gpu/ops_bench.h"
#include "worker/ops/attention_cuda.h"

namespace slidedp::ops {
namespace {

using ::testing::HasSubstr;
using testing::StatusIs;

std::string NameOf(const AttentionShape& s) {
  return absl::StrCat(s.batch, " x ", s.sequence, ", ", s.heads, "/",
                      s.kv_heads, " heads of ", s.head_dim, ", window ",
                      s.window);
}

// {batch, sequence, heads, kv_heads, head_dim, window}
const AttentionShape kShapes[] = {
    {1, 1, 2, 1, 64, 0},      {1, 2, 4, 4, 128, 0},    {2, 127, 4, 2, 64, 0},
    {3, 128, 6, 2, 96, 0},    {1, 129, 2, 2, 128, 0},  {2, 200, 8, 2, 128, 64},
    {1, 257, 4, 1, 256, 0},   {1, 300, 4, 2, 256, 33}, {2, 100, 2, 1, 80, 1},
    {1, 333, 7, 1, 64, 1000}, {1, 513, 14, 2, 64, 129}};
// What cuDNN 9 refuses on every GPU.
const AttentionShape kRefused[] = {{2, 70, 2, 1, 20, 0},
                                   {1, 90, 2, 1, 100, 17}};

struct Tolerances {
  double forward, forward_rms, backward, backward_rms;
};

// BF16: probabilities and their gradients pass through BF16 within.
Tolerances TolerancesOf(ActDType dtype) {
  if (dtype == ActDType::kF32) return {1e-5, 1e-5, 2e-5, 2e-5};
  return {1e-2, 4e-3, 2e-2, 8e-3};
}

class AttentionGpuTest : public ::testing::Test {
 protected:
  void Use(const CudaAttentionOptions& options) {
    options_ = options;
    ASSERT_OK_AND_ASSIGN(
        attention_,
        CudaAttention::Create(bench_.device(), bench_.workspace(), options));
  }

  struct Run {
    Act qkv, out, d_out, d_qkv;
    float* lse;
    size_t qkv_count, out_count;
  };

  // Forward and backward; outputs are NaN before. Documents of the shape are in
  // host memory.
  void RunBoth(AttentionShape s, uint32_t seed, Run& run) {
    if (const int32_t* rows = s.documents.first_row; rows != nullptr) {
      const int32_t* offsets = s.documents.offsets;
      s.documents.first_row =
          bench_.Upload(std::vector<int32_t>(rows, rows + s.tokens()));
      s.documents.offsets = bench_.Upload(std::vector<int32_t>(
          offsets, offsets + s.documents.max_documents + 1));
    }
    const ActDType dtype = options_.activation;
    run.qkv_count = s.tokens() * s.qkv_dim();
    run.out_count = s.tokens() * s.heads * s.head_dim;
    run.qkv = bench_.UploadAct(RandomFloats(run.qkv_count, seed), dtype);
    run.d_out = bench_.UploadAct(RandomFloats(run.out_count, seed + 1), dtype);
    run.out = bench_.UploadAct(Floats(run.out_count, kNaN), dtype);
    run.d_qkv = bench_.UploadAct(Floats(run.qkv_count, kNaN), dtype);
    run.lse = bench_.Upload(Floats(s.tokens() * s.heads, kNaN));
    ASSERT_OK(
        attention_->Forward(run.qkv, s, run.out, run.lse, bench_.stream()));
    ASSERT_OK(attention_->Backward(run.qkv, run.out, run.lse, run.d_out, s,
                                   run.d_qkv, bench_.stream()));
    ASSERT_OK(bench_.device().Synchronize(bench_.stream()));
  }

  // As [batch, heads, sequence]; fused, those of packed documents are [tokens,
  // heads].
  Floats Statistics(const Run& run, const AttentionShape& s) {
    const Floats got = bench_.Download(run.lse, s.tokens() * s.heads);
    if (s.documents.first_row == nullptr || !*attention_->IsFused(s, false)) {
      return got;
    }
    Floats lse(got.size());
    for (int64_t row = 0; row < s.tokens(); ++row) {
      for (int64_t h = 0; h < s.heads; ++h) {
        const int64_t b = row / s.sequence;
        lse[(b * s.heads + h) * s.sequence + row % s.sequence] =
            got[row * s.heads + h];
      }
    }
    return lse;
  }

  void Check(const AttentionShape& s) {
    SCOPED_TRACE(NameOf(s));
    Run run;
    ASSERT_NO_FATAL_FAILURE(RunBoth(s, 20, run));
    const ActDType dtype = options_.activation;
    const Tolerances tolerance = TolerancesOf(dtype);
    const Vec qkv = Wide(OnDevice(RandomFloats(run.qkv_count, 20), dtype));
    const Vec d_out = Wide(OnDevice(RandomFloats(run.out_count, 21), dtype));
    Vec lse;
    const Vec out = reference::Attention(qkv, s, &lse);
    const Vec d_qkv = reference::AttentionBackward(qkv, s, d_out);
    const Floats got = bench_.DownloadAct(run.out, run.out_count, dtype);
    EXPECT_LT(RelativeError(got, out), tolerance.forward);
    EXPECT_LT(RmsError(got, out), tolerance.forward_rms);
    EXPECT_LT(RelativeError(Statistics(run, s), lse), 1e-4);
    const Floats grad = bench_.DownloadAct(run.d_qkv, run.qkv_count, dtype);
    EXPECT_LT(RelativeError(grad, d_qkv), tolerance.backward);
    EXPECT_LT(RmsError(grad, d_qkv), tolerance.backward_rms);
  }

  GpuBench bench_;
  CudaAttentionOptions options_;
  std::unique_ptr<CudaAttention> attention_;
};

TEST_F(AttentionGpuTest, FusedAttentionIsTheFormula) {
  Use({});
  for (const AttentionShape& s : kShapes) Check(s);
}

TEST_F(AttentionGpuTest, ALongOddSequence) {
  Use({});
  Check({1, 4097, 2, 1, 64, 0});
  Check({1, 4097, 2, 1, 128, 1024});
}

TEST_F(AttentionGpuTest, ShapesOfPublishedModelsAreFused) {
  Use({});
  for (const AttentionShape& s : {AttentionShape{1, 256, 32, 8, 128, 0},
                                  {1, 256, 14, 2, 64, 0},
                                  {1, 256, 32, 8, 128, 128},
                                  {1, 256, 16, 8, 256, 0}}) {
    Run run;
    ASSERT_NO_FATAL_FAILURE(RunBoth(s, 5, run));
    EXPECT_THAT(attention_->IsFused(s, false), testing::IsOkAndHolds(true))
        << NameOf(s);
    EXPECT_THAT(attention_->IsFused(s, true), testing::IsOkAndHolds(true))
        << NameOf(s);
  }
}

TEST_F(AttentionGpuTest, WhatCudnnRefusesRunsPlain) {
  Use({});
  for (const AttentionShape& s : kRefused) {
    Check(s);
    EXPECT_THAT(attention_->IsFused(s, false), testing::IsOkAndHolds(false));
    EXPECT_THAT(attention_->IsFused(s, true), testing::IsOkAndHolds(false));
  }
  // Larger than what the plain kernels hold.
  const AttentionShape large = {1, 16, 1, 1, 640, 0};
  Act data = bench_.UploadAct(Floats(16 * 3 * 640), ActDType::kBf16);
  float* lse = bench_.Upload(Floats(16));
  EXPECT_THAT(
      attention_->Backward(data, data, lse, data, large, data, bench_.stream()),
      StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("640")));
}

// Sequences of whole documents, in host memory.
struct Packed {
  // Lengths of all documents; some places more than there are documents.
  Packed(const std::vector<int32_t>& lengths, int64_t empty_places) {
    for (const int32_t length : lengths) {
      const auto row = static_cast<int32_t>(first_row.size());
      offsets.push_back(row);
      first_row.insert(first_row.end(), length, row);
    }
    offsets.insert(offsets.end(), empty_places + 1,
                   static_cast<int32_t>(first_row.size()));
  }
  AttentionShape Of(AttentionShape s) const {
    s.documents = {first_row.data(), offsets.data(),
                   static_cast<int64_t>(offsets.size()) - 1};
    return s;
  }
  std::vector<int32_t> first_row, offsets;
};

TEST_F(AttentionGpuTest, PackedDocumentsStayApart) {
  // Documents within and across blocks of 32 rows, two sequences.
  const Packed packed({1, 62, 64, 73, 130, 70}, 3);
  for (const ActDType dtype : {ActDType::kBf16, ActDType::kF32}) {
    CudaAttentionOptions options;
    options.activation = dtype;
    Use(options);
    for (AttentionShape s : {AttentionShape{2, 200, 4, 2, 64, 0},
                             {2, 200, 2, 2, 128, 0},
                             {2, 200, 8, 2, 128, 0},
                             {2, 200, 2, 1, 256, 0},
                             {2, 200, 4, 2, 64, 40}}) {
      Check(packed.Of(s));
      Check(s);  // planned apart
    }
  }
}

TEST_F(AttentionGpuTest, PackedDocumentsOfPublishedModelsAreFused) {
  Use({});
  // One document that fills its sequence, many short ones, one of a token.
  std::vector<int32_t> lengths = {512};
  for (int i = 0; i < 15; ++i) lengths.push_back(i == 7 ? 1 : 34);
  lengths.push_back(512 - 14 * 34 - 1);
  const Packed packed(lengths, 15);
  for (const AttentionShape& s : {AttentionShape{2, 512, 32, 8, 128, 0},
                                  {2, 512, 14, 2, 64, 0},
                                  {2, 512, 32, 8, 128, 128},
                                  {2, 512, 8, 8, 128, 0}}) {
    const AttentionShape p = packed.Of(s);
    Check(p);
    EXPECT_THAT(attention_->IsFused(p, false), testing::IsOkAndHolds(true))
        << NameOf(s);
    EXPECT_THAT(attention_->IsFused(p, true), testing::IsOkAndHolds(true))
        << NameOf(s);
  }
}

// What a plan was made with is not what it runs with: documents move.
TEST_F(AttentionGpuTest, APlanServesAnyDocumentsOfItsPlaces) {
  Use({});
  const AttentionShape s = {2, 512, 8, 2, 128, 0};
  Check(Packed({512, 512}, 8).Of(s));
  attention_->set_mode(PlanMode::kFrozen);
  Check(Packed({511, 1, 100, 100, 100, 100, 111, 1}, 2).Of(s));
  Check(Packed({256, 256, 1, 2, 3, 4, 250, 251, 1}, 1).Of(s));
}

TEST_F(AttentionGpuTest, DeterministicPackedDocumentsRunPlain) {
  CudaAttentionOptions options;
  options.deterministic = true;
  Use(options);
  const Packed packed({130, 70, 200}, 0);
  const AttentionShape s = packed.Of({2, 200, 4, 2, 64, 0});
  Check(s);
  EXPECT_THAT(attention_->IsFused(s, false), testing::IsOkAndHolds(false));
  EXPECT_THAT(attention_->IsFused(s, true), testing::IsOkAndHolds(false));
}

TEST_F(AttentionGpuTest, HeadsOf512TrainOneWayOrAnother) {
  Use({});
  Check({1, 150, 2, 1, 512, 0});
}

TEST_F(AttentionGpuTest, Float32IsTheFormula) {
  CudaAttentionOptions options;
  options.activation = ActDType::kF32;
  Use(options);
  for (const AttentionShape& s : kShapes) Check(s);
  for (const AttentionShape& s : kRefused) Check(s);
  Check({1, 150, 2, 1, 512, 40});
}

TEST_F(AttentionGpuTest, DeterministicRunsGiveTheSameBits) {
  CudaAttentionOptions options;
  options.deterministic = true;
  Use(options);
  for (const AttentionShape& s :
       {AttentionShape{2, 1024, 8, 2, 128, 0}, {1, 2048, 4, 2, 64, 300}}) {
    Check(s);
    Run first;
    ASSERT_NO_FATAL_FAILURE(RunBoth(s, 6, first));
    const Floats want =
        bench_.DownloadAct(first.d_qkv, first.qkv_count, ActDType::kBf16);
    for (int i = 0; i < 5; ++i) {
      Run run;
      ASSERT_NO_FATAL_FAILURE(RunBoth(s, 6, run));
      EXPECT_EQ(bench_.DownloadAct(run.d_qkv, run.qkv_count, ActDType::kBf16),
                want);
    }
  }
}

TEST_F(AttentionGpuTest, DeterministicWorkspaceIsBoundedBySplitting) {
  const AttentionShape s = {6, 256, 8, 4, 64, 0};
  CudaAttentionOptions options;
  options.deterministic = true;
  const SdpaShape group = {1, 256, 2, 1, 64, 0, s.qkv_dim(), 512};
  const size_t unit = DeterministicWorkspaceBytes(group);
  // Sequences together; one sequence; groups of two kv heads; of one.
  for (const size_t units : {size_t{12}, size_t{4}, size_t{3}, size_t{1}}) {
    SCOPED_TRACE(units);
    options.deterministic_workspace_bytes = units * unit;
    Use(options);
    Check(s);
    EXPECT_THAT(attention_->IsFused(s, true), testing::IsOkAndHolds(true));
  }
  // Not even one: the plain kernels.
  options.deterministic_workspace_bytes = unit - 1;
  Use(options);
  Check(s);
  EXPECT_THAT(attention_->IsFused(s, true), testing::IsOkAndHolds(false));
  EXPECT_THAT(attention_->IsFused(s, false), testing::IsOkAndHolds(true));
}

TEST_F(AttentionGpuTest, AfterWarmUpNothingIsPlannedOrAllocated) {
  Use({});
  const AttentionShape s = {2, 192, 4, 2, 128, 0};
  attention_->set_mode(PlanMode::kTimed);
  Run run;
  ASSERT_NO_FATAL_FAILURE(RunBoth(s, 7, run));
  attention_->set_mode(PlanMode::kFrozen);
  bench_.workspace().Freeze();
  const size_t workspace = bench_.workspace().bytes();
  Check(s);
  EXPECT_EQ(bench_.workspace().bytes(), workspace);
  AttentionShape other = s;
  other.sequence = 191;
  EXPECT_THAT(
      attention_->Forward(run.qkv, other, run.out, run.lse, bench_.stream()),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("2 x 191")));
}

TEST_F(AttentionGpuTest, ShapesThatMakeNoSenseAreRefused) {
  Use({});
  for (const AttentionShape& s : {AttentionShape{1, 16, 3, 2, 64, 0},
                                  {1, 0, 2, 1, 64, 0},
                                  {1, 16, 2, 1, 64, -1},
                                  {1, 16, 2, 0, 64, 0}}) {
    EXPECT_FALSE(
        attention_->Forward(nullptr, s, nullptr, nullptr, bench_.stream())
            .ok());
  }
}

}  // namespace
}  // namespace slidedp::ops
