// Ops but linear and attention on the GPU beside the CPU's on the same values,
// in BF16 and float32, from aligned and from odd addresses.
#pragma once

#include <memory>
#include <tuple>
#include <vector>

#include "tests/gpu/ops_bench.h"
#include "worker/ops/cuda_ops.h"

namespace slidedp::ops {

inline constexpr double kEps = 1e-6;
inline constexpr double kF32 = 1e-5;
// Of one rounding to BF16, 2^-9, three times over: room for the sums before it.
inline constexpr double kRounded = 6e-3;
// Rotation adds two values that were rounded twice, and is rounded: up to
// (2 sqrt(2) + 1) 2^-9.
inline constexpr double kTurned = 8e-3;

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
  void CheckCopyUsedRows(int64_t rows, int64_t width, int64_t begin,
                         int64_t end, int64_t out_shift);
  void CheckCrossEntropy(int64_t rows, int64_t vocab);

  GpuBench bench_;
  OpsBench cpu_;
  std::unique_ptr<CudaOps> gpu_;
};

}  // namespace slidedp::ops
