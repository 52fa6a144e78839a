// One block a row; a row's second reading comes from the cache. With BF16
// activations x * rstd is rounded before the weight is applied, as the models'
// own code does.
#include "worker/ops/cuda_elements.cuh"
#include "worker/ops/cuda_kernels.h"

namespace slidedp::ops {
namespace {

using namespace cuda;  // NOLINT: one file, one subject

constexpr int kThreads = 256;

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    Forward(const T* x, const bf16* w, int64_t hidden, float eps, T* out,
            float* rstd) {
  const int64_t row = blockIdx.x;
  x += row * hidden;
  out += row * hidden;
  float sum = 0;
  for (int64_t i = threadIdx.x * N; i < hidden; i += kThreads * N) {
    float v[N];
    Load(x + i, v);
#pragma unroll
    for (int j = 0; j < N; ++j) sum += v[j] * v[j];
  }
  const float r =
      1.0f / sqrtf(BlockSum(sum) / static_cast<float>(hidden) + eps);
  if (threadIdx.x == 0) rstd[row] = r;
  for (int64_t i = threadIdx.x * N; i < hidden; i += kThreads * N) {
    float v[N], weight[N];
    Load(x + i, v);
    Load(w + i, weight);
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = Rounded<T>(v[j] * r) * weight[j];
    Store(v, out + i);
  }
}

// A block goes over rows blockIdx.x, + gridDim.x, ...; each column of their
// weight gradient has one owner. An element of d_out is read for the last time
// by the thread that writes that of d_x: they may be the same.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    Backward(const T* x, const bf16* w, const float* rstd, const T* d_out,
             int64_t tokens, int64_t hidden, bool add, float* partial, T* d_x) {
  extern __shared__ float4 shared[];
  float* sums = reinterpret_cast<float*>(shared);  // [hidden]
  for (int64_t i = threadIdx.x * N; i < hidden; i += kThreads * N) {
#pragma unroll
    for (int j = 0; j < N; ++j) sums[i + j] = 0;
  }
  for (int64_t row = blockIdx.x; row < tokens; row += gridDim.x) {
    const int64_t at = row * hidden;
    float dot = 0;
    for (int64_t i = threadIdx.x * N; i < hidden; i += kThreads * N) {
      float v[N], weight[N], d_y[N];
      Load(x + at + i, v);
      Load(w + i, weight);
      Load(d_out + at + i, d_y);
#pragma unroll
      for (int j = 0; j < N; ++j) dot += d_y[j] * weight[j] * v[j];
    }
    const float r = rstd[row];
    // r (r (r dot)): r^3 alone could leave the range of float.
    const float mean =
        r * (r * (r * (BlockSum(dot) / static_cast<float>(hidden))));
    for (int64_t i = threadIdx.x * N; i < hidden; i += kThreads * N) {
      float v[N], weight[N], d_y[N], sum[N], d[N] = {};
      Load(x + at + i, v);
      Load(w + i, weight);
      Load(d_out + at + i, d_y);
      Load(sums + i, sum);
      if (add) Load(d_x + at + i, d);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        sum[j] += d_y[j] * Rounded<T>(v[j] * r);
        d[j] += d_y[j] * weight[j] * r - v[j] * mean;
      }
      Store(sum, sums + i);
      Store(d, d_x + at + i);
    }
  }
  for (int64_t i = threadIdx.x * N; i < hidden; i += kThreads * N) {
    float sum[N];
    Load(sums + i, sum);
    Store(sum, partial + blockIdx.x * hidden + i);
  }
}

template <typename T, int N>
cudaError_t RunBackward(const T* x, const bf16* w, const float* rstd,
                        const T* d_out, int64_t tokens, int64_t hidden,
                        bool add, float* partial, T* d_x, cudaStream_t stream) {
  const size_t bytes = hidden * sizeof(float);
  const cudaError_t error = cudaFuncSetAttribute(
      &Backward<T, N>, cudaFuncAttributeMaxDynamicSharedMemorySize,
      static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  Backward<T, N>
      <<<static_cast<unsigned>(GradientParts(tokens)), kThreads, bytes,
         stream>>>(x, w, rstd, d_out, tokens, hidden, add, partial, d_x);
  return cudaGetLastError();
}

}  // namespace

template <typename T>
cudaError_t LaunchRmsNormForward(const T* x, const bf16* w, int64_t tokens,
                                 int64_t hidden, float eps, T* out, float* rstd,
                                 cudaStream_t stream) {
  constexpr int kN = kVector<T>;
  const auto blocks = static_cast<unsigned>(tokens);
  if (IsVector(kN, hidden, {x, w, out})) {
    Forward<T, kN>
        <<<blocks, kThreads, 0, stream>>>(x, w, hidden, eps, out, rstd);
  } else {
    Forward<T, 1>
        <<<blocks, kThreads, 0, stream>>>(x, w, hidden, eps, out, rstd);
  }
  return cudaGetLastError();
}

template <typename T>
cudaError_t LaunchRmsNormBackward(const T* x, const bf16* w, const float* rstd,
                                  const T* d_out, int64_t tokens,
                                  int64_t hidden, bool add, float* partial,
                                  T* d_x, float* d_w, cudaStream_t stream) {
  constexpr int kN = kVector<T>;
  const cudaError_t error =
      IsVector(kN, hidden, {x, w, d_out, d_x, partial})
          ? RunBackward<T, kN>(x, w, rstd, d_out, tokens, hidden, add, partial,
                               d_x, stream)
          : RunBackward<T, 1>(x, w, rstd, d_out, tokens, hidden, add, partial,
                              d_x, stream);
  if (error != cudaSuccess) return error;
  return LaunchAddPartials(partial, GradientParts(tokens), hidden, hidden, d_w,
                           stream);
}

template cudaError_t LaunchRmsNormForward(const float*, const bf16*, int64_t,
                                          int64_t, float, float*, float*,
                                          cudaStream_t);
template cudaError_t LaunchRmsNormForward(const bf16*, const bf16*, int64_t,
                                          int64_t, float, bf16*, float*,
                                          cudaStream_t);
template cudaError_t LaunchRmsNormBackward(const float*, const bf16*,
                                           const float*, const float*, int64_t,
                                           int64_t, bool, float*, float*,
                                           float*, cudaStream_t);
template cudaError_t LaunchRmsNormBackward(const bf16*, const bf16*,
                                           const float*, const bf16*, int64_t,
                                           int64_t, bool, float*, bf16*, float*,
                                           cudaStream_t);

}  // namespace slidedp::ops
