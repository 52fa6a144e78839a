#include <cmath>

#include "worker/ops/cuda_elements.cuh"
#include "worker/ops/cuda_kernels.h"

namespace slidedp::ops {
namespace {

using namespace cuda;  // NOLINT: one file, one subject

constexpr int kThreads = 1024;

__device__ float BlockMax(float x) {
  __shared__ float tops[kThreads / 32];
  for (int step = 16; step > 0; step /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  }
  if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = x;
  __syncthreads();
  for (int warp = 0; warp < kThreads / 32; ++warp) x = fmaxf(x, tops[warp]);
  return x;
}

// One block a row: its largest logit and the sum of exponentials in one pass,
// its gradient in the next. Maxima skip NaN, sums keep it.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    Rows(T* logits, const int32_t* labels, int64_t vocab, float scale,
         double* losses) {
  const int64_t row = blockIdx.x;
  T* x = logits + row * vocab;
  const int32_t label = labels[row];
  if (label < 0) {
    const float zeros[N] = {};
    for (int64_t i = threadIdx.x * N; i < vocab; i += kThreads * N) {
      Store(zeros, x + i);
    }
    if (threadIdx.x == 0) losses[row] = 0;
    return;
  }
  if (label >= vocab) __trap();
  // Read before any thread writes: barriers follow.
  const float label_logit = ToFloat(x[label]);

  float top = -INFINITY, sum = 0;
  for (int64_t i = threadIdx.x * N; i < vocab; i += kThreads * N) {
    float v[N];
    Load(x + i, v);
    float here = v[0];
#pragma unroll
    for (int j = 1; j < N; ++j) here = fmaxf(here, v[j]);
    if (here > top) {
      sum *= Exp<T>(top - here);
      top = here;
    }
    const float shift = top == -INFINITY ? 0.0f : top;
#pragma unroll
    for (int j = 0; j < N; ++j) sum += Exp<T>(v[j] - shift);
  }
  const float row_top = BlockMax(top);
  if (top != -INFINITY) sum *= Exp<T>(top - row_top);
  const double row_sum = BlockSum(static_cast<double>(sum));
  if (threadIdx.x == 0) {
    losses[row] = log(row_sum) + (static_cast<double>(row_top) - label_logit);
  }

  const float factor = static_cast<float>(scale / row_sum);
  for (int64_t i = threadIdx.x * N; i < vocab; i += kThreads * N) {
    float v[N];
    Load(x + i, v);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      v[j] = Exp<T>(v[j] - row_top) * factor;
      if (i + j == label) v[j] -= scale;
    }
    Store(v, x + i);
  }
}

// One block: the order is fixed by the number of rows.
__global__ void __launch_bounds__(kThreads)
    AddLosses(const double* losses, int64_t rows, double* loss_sum) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < rows; i += kThreads) sum += losses[i];
  sum = BlockSum(sum);
  if (threadIdx.x == 0) *loss_sum += sum;
}

}  // namespace

template <typename T>
cudaError_t LaunchCrossEntropy(T* logits, const int32_t* labels, int64_t rows,
                               int64_t vocab, float scale, double* losses,
                               double* loss_sum, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(rows);
  if (IsVector(kVector<T>, vocab, {logits})) {
    Rows<T, kVector<T>>
        <<<blocks, kThreads, 0, stream>>>(logits, labels, vocab, scale, losses);
  } else {
    Rows<T, 1>
        <<<blocks, kThreads, 0, stream>>>(logits, labels, vocab, scale, losses);
  }
  AddLosses<<<1, kThreads, 0, stream>>>(losses, rows, loss_sum);
  return cudaGetLastError();
}

template cudaError_t LaunchCrossEntropy(float*, const int32_t*, int64_t,
                                        int64_t, float, double*, double*,
                                        cudaStream_t);
template cudaError_t LaunchCrossEntropy(bf16*, const int32_t*, int64_t, int64_t,
                                        float, double*, double*, cudaStream_t);

}  // namespace slidedp::ops
