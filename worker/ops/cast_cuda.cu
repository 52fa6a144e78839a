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

// A block for each row that the range meets.
__global__ void __launch_bounds__(kThreads)
    CopyUsed(UsedRows used, int64_t width, int64_t begin, int64_t count,
             const bf16* values, bf16* out) {
  const int64_t row = begin / width + blockIdx.x;
  uint64_t bits = 0;
  for (int set = 0; set < used.sets; ++set) {
    bits |= used.bitmaps[set * used.words + row / 64];
  }
  if ((bits >> (row % 64) & 1) == 0) return;
  // The part of the row that lies in the range.
  const int64_t first = max(row * width - begin, int64_t{0});
  const int64_t last = min((row + 1) * width - begin, count);
  const bf16* from = values + first;
  bf16* to = out + first;
  const int64_t n = last - first;
  const bool aligned =
      (reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) %
          sizeof(uint4) ==
      0;
  const int64_t vectors = aligned ? n / kWidth : 0;
  for (int64_t i = threadIdx.x; i < vectors; i += kThreads) {
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  }
  for (int64_t i = vectors * kWidth + threadIdx.x; i < n; i += kThreads) {
    to[i] = from[i];
  }
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

cudaError_t LaunchCopyUsedRows(const UsedRows& used, int64_t width,
                               int64_t begin, int64_t count, const bf16* values,
                               bf16* out, cudaStream_t stream) {
  const int64_t rows = (begin + count - 1) / width - begin / width + 1;
  CopyUsed<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(
      used, width, begin, count, values, out);
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
