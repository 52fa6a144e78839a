#include "worker/ops/cuda_elements.cuh"
#include "worker/ops/cuda_kernels.h"

namespace slidedp::ops {
namespace {

using namespace cuda;  // NOLINT: one file, one subject

constexpr int kThreads = 256;

// 0 where the exponential overflows.
template <typename T>
__device__ float Sigmoid(float x) {
  const float sum = 1.0f + Exp<T>(-x);
  return sizeof(T) == sizeof(float) ? 1.0f / sum : __fdividef(1.0f, sum);
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    Forward(const T* gate_up, int64_t tokens, int64_t inner, T* out) {
  const int64_t i =
      (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N;
  if (i >= inner) return;
  for (int64_t t = blockIdx.y; t < tokens; t += gridDim.y) {
    float gate[N], up[N], y[N];
    Load(gate_up + t * 2 * inner + i, gate);
    Load(gate_up + t * 2 * inner + inner + i, up);
#pragma unroll
    for (int j = 0; j < N; ++j) y[j] = gate[j] * Sigmoid<T>(gate[j]) * up[j];
    Store(y, out + t * inner + i);
  }
}

// A thread reads what it overwrites, first: d_gate_up may be gate_up, and
// activated, which may be null, d_out.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    Backward(const T* gate_up, const T* d_out, int64_t tokens, int64_t inner,
             T* d_gate_up, T* activated) {
  const int64_t i =
      (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * N;
  if (i >= inner) return;
  for (int64_t t = blockIdx.y; t < tokens; t += gridDim.y) {
    float gate[N], up[N], d_y[N];
    Load(gate_up + t * 2 * inner + i, gate);
    Load(gate_up + t * 2 * inner + inner + i, up);
    Load(d_out + t * inner + i, d_y);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float g = gate[j], u = up[j], s = Sigmoid<T>(g), silu = g * s;
      gate[j] = d_y[j] * u * (s * (1.0f + g * (1.0f - s)));
      up[j] = d_y[j] * silu;
      d_y[j] = silu * u;
    }
    if (activated != nullptr) Store(d_y, activated + t * inner + i);
    Store(gate, d_gate_up + t * 2 * inner + i);
    Store(up, d_gate_up + t * 2 * inner + inner + i);
  }
}

}  // namespace

template <typename T>
cudaError_t LaunchSwiGluForward(const T* gate_up, int64_t tokens, int64_t inner,
                                T* out, cudaStream_t stream) {
  constexpr int kN = kVector<T>;
  if (IsVector(kN, inner, {gate_up, out})) {
    Forward<T, kN>
        <<<RowGrid(tokens, inner / kN, kThreads), kThreads, 0, stream>>>(
            gate_up, tokens, inner, out);
  } else {
    Forward<T, 1><<<RowGrid(tokens, inner, kThreads), kThreads, 0, stream>>>(
        gate_up, tokens, inner, out);
  }
  return cudaGetLastError();
}

template <typename T>
cudaError_t LaunchSwiGluBackward(const T* gate_up, const T* d_out,
                                 int64_t tokens, int64_t inner, T* d_gate_up,
                                 T* activated, cudaStream_t stream) {
  constexpr int kN = kVector<T>;
  if (IsVector(kN, inner, {gate_up, d_out, d_gate_up, activated})) {
    Backward<T, kN>
        <<<RowGrid(tokens, inner / kN, kThreads), kThreads, 0, stream>>>(
            gate_up, d_out, tokens, inner, d_gate_up, activated);
  } else {
    Backward<T, 1><<<RowGrid(tokens, inner, kThreads), kThreads, 0, stream>>>(
        gate_up, d_out, tokens, inner, d_gate_up, activated);
  }
  return cudaGetLastError();
}

template cudaError_t LaunchSwiGluForward(const float*, int64_t, int64_t, float*,
                                         cudaStream_t);
template cudaError_t LaunchSwiGluForward(const bf16*, int64_t, int64_t, bf16*,
                                         cudaStream_t);
template cudaError_t LaunchSwiGluBackward(const float*, const float*, int64_t,
                                          int64_t, float*, float*,
                                          cudaStream_t);
template cudaError_t LaunchSwiGluBackward(const bf16*, const bf16*, int64_t,
                                          int64_t, bf16*, bf16*, cudaStream_t);

}  // namespace slidedp::ops
