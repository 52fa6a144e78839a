// One block a row. Rows of up to kMaxHeld vectors a thread stay in registers
// between their two uses, all of their loads in flight at once; the second
// reading of a longer one comes from the cache. With BF16 activations x * rstd
// is rounded before the weight is applied, as the models' own code does.
#include <type_traits>

#include "worker/ops/cuda_elements.cuh"
#include "worker/ops/cuda_kernels.h"

namespace slidedp::ops {
namespace {

using namespace cuda;  // NOLINT: one file, one subject

constexpr int kThreads = 256;
constexpr int kMaxHeld = 4;

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
// by the thread that writes that of d_x and of normed, before it does: either
// may be d_out. normed may be null.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    Backward(const T* x, const bf16* w, const float* rstd, const T* d_out,
             int64_t tokens, int64_t hidden, bool add, float* partial, T* d_x,
             T* normed) {
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
        const float scaled = Rounded<T>(v[j] * r);
        sum[j] += d_y[j] * scaled;
        d[j] += d_y[j] * weight[j] * r - v[j] * mean;
        v[j] = scaled * weight[j];
      }
      Store(sum, sums + i);
      Store(d, d_x + at + i);
      if (normed != nullptr) Store(v, normed + at + i);
    }
  }
  for (int64_t i = threadIdx.x * N; i < hidden; i += kThreads * N) {
    float sum[N];
    Load(sums + i, sum);
    Store(sum, partial + blockIdx.x * hidden + i);
  }
}

// The same two with a row in registers: vector threadIdx.x + k * kThreads of it
// is the thread's k-th.
template <int N>
__device__ int64_t Column(int k) {
  return (static_cast<int64_t>(k) * kThreads + threadIdx.x) * N;
}
template <typename T, int N, int H>
__device__ void Hold(const T* row, int64_t hidden, Pack<T, N> (&held)[H]) {
#pragma unroll
  for (int k = 0; k < H; ++k) {
    const int64_t i = Column<N>(k);
    if (i < hidden) held[k] = *reinterpret_cast<const Pack<T, N>*>(row + i);
  }
}

template <typename T, int N, int H>
__global__ void __launch_bounds__(kThreads)
    HeldForward(const T* x, const bf16* w, int64_t hidden, float eps, T* out,
                float* rstd) {
  const int64_t row = blockIdx.x;
  Pack<T, N> held[H];
  Hold(x + row * hidden, hidden, held);
  float sum = 0;
#pragma unroll
  for (int k = 0; k < H; ++k) {
    if (Column<N>(k) >= hidden) break;
    float v[N];
    Unpack(held[k], v);
#pragma unroll
    for (int j = 0; j < N; ++j) sum += v[j] * v[j];
  }
  const float r =
      1.0f / sqrtf(BlockSum(sum) / static_cast<float>(hidden) + eps);
  if (threadIdx.x == 0) rstd[row] = r;
#pragma unroll
  for (int k = 0; k < H; ++k) {
    const int64_t i = Column<N>(k);
    if (i >= hidden) break;
    float v[N], weight[N];
    Unpack(held[k], v);
    Load(w + i, weight);
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = Rounded<T>(v[j] * r) * weight[j];
    Store(v, out + row * hidden + i);
  }
}

template <typename T, int N, int H>
__global__ void __launch_bounds__(kThreads, H <= 2 ? 4 : 2)
    HeldBackward(const T* x, const bf16* w, const float* rstd, const T* d_out,
                 int64_t tokens, int64_t hidden, bool add, float* partial,
                 T* d_x, T* normed) {
  float sums[H][N] = {};
  for (int64_t row = blockIdx.x; row < tokens; row += gridDim.x) {
    const int64_t at = row * hidden;
    Pack<T, N> held_x[H], held_y[H], held_d[H];
    Hold(x + at, hidden, held_x);
    Hold(d_out + at, hidden, held_y);
    if (add) Hold(d_x + at, hidden, held_d);
    const float r = rstd[row];
    float dot = 0;
#pragma unroll
    for (int k = 0; k < H; ++k) {
      const int64_t i = Column<N>(k);
      if (i >= hidden) break;
      float v[N], weight[N], d_y[N];
      Unpack(held_x[k], v);
      Unpack(held_y[k], d_y);
      Load(w + i, weight);
#pragma unroll
      for (int j = 0; j < N; ++j) dot += d_y[j] * weight[j] * v[j];
    }
    const float mean =
        r * (r * (r * (BlockSum(dot) / static_cast<float>(hidden))));
#pragma unroll
    for (int k = 0; k < H; ++k) {
      const int64_t i = Column<N>(k);
      if (i >= hidden) break;
      float v[N], weight[N], d_y[N], d[N] = {};
      Unpack(held_x[k], v);
      Unpack(held_y[k], d_y);
      Load(w + i, weight);
      if (add) Unpack(held_d[k], d);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float scaled = Rounded<T>(v[j] * r);
        sums[k][j] += d_y[j] * scaled;
        d[j] += d_y[j] * weight[j] * r - v[j] * mean;
        v[j] = scaled * weight[j];
      }
      Store(d, d_x + at + i);
      if (normed != nullptr) Store(v, normed + at + i);
    }
  }
#pragma unroll
  for (int k = 0; k < H; ++k) {
    const int64_t i = Column<N>(k);
    if (i < hidden) Store(sums[k], partial + blockIdx.x * hidden + i);
  }
}

// run(H) with H = 1 ... kMaxHeld as a constant: vectors of N a thread.
template <int N, typename Run>
cudaError_t WithHeld(int64_t hidden, Run run) {
  static_assert(kMaxHeld == 4);
  switch (CeilDiv(hidden, kThreads * N)) {
    case 1:
      return run(std::integral_constant<int, 1>());
    case 2:
      return run(std::integral_constant<int, 2>());
    case 3:
      return run(std::integral_constant<int, 3>());
    default:
      return run(std::integral_constant<int, kMaxHeld>());
  }
}

template <typename T, int N>
cudaError_t RunBackward(const T* x, const bf16* w, const float* rstd,
                        const T* d_out, int64_t tokens, int64_t hidden,
                        bool add, float* partial, T* d_x, T* normed,
                        cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(GradientParts(tokens));
  if (N > 1 && hidden <= int64_t{kMaxHeld} * kThreads * N) {
    return WithHeld<N>(hidden, [&](auto h) {
      HeldBackward<T, N, decltype(h)::value><<<blocks, kThreads, 0, stream>>>(
          x, w, rstd, d_out, tokens, hidden, add, partial, d_x, normed);
      return cudaGetLastError();
    });
  }
  const size_t bytes = hidden * sizeof(float);
  const cudaError_t error = cudaFuncSetAttribute(
      &Backward<T, N>, cudaFuncAttributeMaxDynamicSharedMemorySize,
      static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  Backward<T, N><<<blocks, kThreads, bytes, stream>>>(
      x, w, rstd, d_out, tokens, hidden, add, partial, d_x, normed);
  return cudaGetLastError();
}

}  // namespace

template <typename T>
cudaError_t LaunchRmsNormForward(const T* x, const bf16* w, int64_t tokens,
                                 int64_t hidden, float eps, T* out, float* rstd,
                                 cudaStream_t stream) {
  constexpr int kN = kVector<T>;
  const auto blocks = static_cast<unsigned>(tokens);
  if (!IsVector(kN, hidden, {x, w, out})) {
    Forward<T, 1>
        <<<blocks, kThreads, 0, stream>>>(x, w, hidden, eps, out, rstd);
  } else if (hidden > int64_t{kMaxHeld} * kThreads * kN) {
    Forward<T, kN>
        <<<blocks, kThreads, 0, stream>>>(x, w, hidden, eps, out, rstd);
  } else {
    return WithHeld<kN>(hidden, [&](auto h) {
      HeldForward<T, kN, decltype(h)::value>
          <<<blocks, kThreads, 0, stream>>>(x, w, hidden, eps, out, rstd);
      return cudaGetLastError();
    });
  }
  return cudaGetLastError();
}

template <typename T>
cudaError_t LaunchRmsNormBackward(const T* x, const bf16* w, const float* rstd,
                                  const T* d_out, int64_t tokens,
                                  int64_t hidden, bool add, float* partial,
                                  T* d_x, float* d_w, T* normed,
                                  cudaStream_t stream) {
  constexpr int kN = kVector<T>;
  const cudaError_t error =
      IsVector(kN, hidden, {x, w, d_out, d_x, partial, normed})
          ? RunBackward<T, kN>(x, w, rstd, d_out, tokens, hidden, add, partial,
                               d_x, normed, stream)
          : RunBackward<T, 1>(x, w, rstd, d_out, tokens, hidden, add, partial,
                              d_x, normed, stream);
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
                                           float*, float*, cudaStream_t);
template cudaError_t LaunchRmsNormBackward(const bf16*, const bf16*,
                                           const float*, const bf16*, int64_t,
                                           int64_t, bool, float*, bf16*, float*,
                                           bf16*, cudaStream_t);

}  // namespace slidedp::ops
