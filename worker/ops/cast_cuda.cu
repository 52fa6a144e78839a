// What happens to a unit's gradient before it leaves the device.
#include "worker/ops/cuda_elements.cuh"
#include "worker/ops/cuda_kernels.h"

namespace slidedp::ops {
namespace {

using namespace cuda;  // NOLINT: one file, one subject

constexpr int kThreads = 256;
constexpr int kWidth = kVector<bf16>;
constexpr int64_t kMaxBlocks = 16 << 10;

// Groups of N elements; what is left after the last goes to the first threads.
template <int N>
__global__ void __launch_bounds__(kThreads)
    Cast(const float* x, int64_t count, bf16* out) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t first =
      static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t i = first; i < count / N; i += step) {
    float v[N];
    Load(x + i * N, v);
    Store(v, out + i * N);
  }
  const int64_t i = count / N * N + first;
  if (i < count) out[i] = Round<bf16>(x[i]);
}

// The same terms and order whether loads are aligned or not.
template <bool kAligned>
__global__ void __launch_bounds__(kThreads)
    SumSquares(const bf16* x, int64_t count, double* partial) {
  const int64_t step = static_cast<int64_t>(kSquaredNormParts) * kThreads;
  double sum = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
       i * kWidth < count; i += step) {
    const int64_t first = i * kWidth;
    float v[kWidth] = {};
    if (kAligned && first + kWidth <= count) {
      Load(x + first, v);
    } else {
      for (int j = 0; j < kWidth && first + j < count; ++j) {
        v[j] = ToFloat(x[first + j]);
      }
    }
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const double value = v[j];
      sum += value * value;
    }
  }
  sum = BlockSum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads)
    SumParts(const double* partial, double* out) {
  double sum = 0;
  for (int i = threadIdx.x; i < kSquaredNormParts; i += kThreads) {
    sum += partial[i];
  }
  sum = BlockSum(sum);
  if (threadIdx.x == 0) *out = sum;
}

}  // namespace

cudaError_t LaunchCastToBf16(const float* x, int64_t count, bf16* out,
                             cudaStream_t stream) {
  const bool vector = IsVector(1, count, {x, out});
  const int64_t groups = vector ? CeilDiv(count, kWidth) : count;
  const auto blocks =
      static_cast<unsigned>(std::min(CeilDiv(groups, kThreads), kMaxBlocks));
  if (vector) {
    Cast<kWidth><<<blocks, kThreads, 0, stream>>>(x, count, out);
  } else {
    Cast<1><<<blocks, kThreads, 0, stream>>>(x, count, out);
  }
  return cudaGetLastError();
}

cudaError_t LaunchSquaredNorm(const bf16* x, int64_t count, double* partial,
                              double* out, cudaStream_t stream) {
  if (IsVector(1, count, {x})) {
    SumSquares<true>
        <<<kSquaredNormParts, kThreads, 0, stream>>>(x, count, partial);
  } else {
    SumSquares<false>
        <<<kSquaredNormParts, kThreads, 0, stream>>>(x, count, partial);
  }
  SumParts<<<1, kThreads, 0, stream>>>(partial, out);
  return cudaGetLastError();
}

}  // namespace slidedp::ops
