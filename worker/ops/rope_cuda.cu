// Per-head RMS norm of q and k, then rotation. One block a token, which
// computes the token's angles once for all heads; a head belongs to a group of
// lanes: with vectors, one vector of each half a lane, else a warp. With BF16
// activations a normed head is rounded before and after its weight, as the
// models' own code does; cosines and sines stay float32.
#include "worker/ops/cuda_elements.cuh"
#include "worker/ops/cuda_kernels.h"

namespace slidedp::ops {
namespace {

using namespace cuda;  // NOLINT: one file, one subject

constexpr int kThreads = 256;

struct Geometry {
  int64_t tokens, sequence, row;  // row: elements of a token
  int heads, rotated, d, half;
  int lanes;                 // of a group; a power of two
  const int32_t* first_row;  // of each token's document; null: its sequence's

  int groups() const { return kThreads / lanes; }
};

// angles: cosines [half], sines [half].
__device__ void Angles(const Geometry& g, int64_t token,
                       const float* inverse_frequencies, float* angles) {
  const auto position = static_cast<float>(
      g.first_row == nullptr ? token % g.sequence : token - g.first_row[token]);
  for (int i = threadIdx.x; i < g.half; i += kThreads) {
    // The product is rounded, never fused: far angles depend on it.
    sincosf(__fmul_rn(position, inverse_frequencies[i]), angles + g.half + i,
            angles + i);
  }
}

__device__ float GroupSum(float x, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, step);
  }
  return x;
}

// A lane writes only elements that no other lane reads: out may be qkv.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    Forward(Geometry g, const T* qkv, const bf16* q_norm, const bf16* k_norm,
            float eps, const float* inverse_frequencies, T* out, float* rstd) {
  extern __shared__ float4 shared[];
  auto* angles = reinterpret_cast<float*>(shared);
  const int64_t token = blockIdx.x;
  Angles(g, token, inverse_frequencies, angles);
  __syncthreads();
  const int lane = threadIdx.x % g.lanes, groups = kThreads / g.lanes;
  const bool norms = q_norm != nullptr || k_norm != nullptr;
  for (int first = 0; first < g.rotated; first += groups) {
    const int head = first + threadIdx.x / g.lanes;
    const bool active = head < g.rotated;
    const bf16* w = head < g.heads ? q_norm : k_norm;
    const int64_t at = token * g.row + static_cast<int64_t>(head) * g.d;
    float r = 1;
    if (norms) {
      float sum = 0;
      for (int i = lane * N; active && i < g.half; i += g.lanes * N) {
        float lo[N], hi[N];
        Load(qkv + at + i, lo);
        Load(qkv + at + g.half + i, hi);
#pragma unroll
        for (int j = 0; j < N; ++j) sum += lo[j] * lo[j] + hi[j] * hi[j];
      }
      sum = GroupSum(sum, g.lanes);
      r = 1.0f / sqrtf(sum / static_cast<float>(g.d) + eps);
      if (active && w != nullptr && lane == 0) {
        rstd[token * g.rotated + head] = r;
      }
    }
    for (int i = lane * N; active && i < g.half; i += g.lanes * N) {
      float lo[N], hi[N], c[N], s[N];
      Load(qkv + at + i, lo);
      Load(qkv + at + g.half + i, hi);
      if (w != nullptr) {
        float w_lo[N], w_hi[N];
        Load(w + i, w_lo);
        Load(w + g.half + i, w_hi);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          lo[j] = Rounded<T>(Rounded<T>(lo[j] * r) * w_lo[j]);
          hi[j] = Rounded<T>(Rounded<T>(hi[j] * r) * w_hi[j]);
        }
      }
      Load(angles + i, c);
      Load(angles + g.half + i, s);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float a = lo[j], b = hi[j];
        lo[j] = a * c[j] - b * s[j];
        hi[j] = b * c[j] + a * s[j];
      }
      Store(lo, out + at + i);
      Store(hi, out + at + g.half + i);
    }
  }
  if (out == qkv) return;
  const int64_t v = token * g.row;
  for (int64_t i = static_cast<int64_t>(g.rotated) * g.d + threadIdx.x * N;
       i < g.row; i += kThreads * N) {
    float value[N];
    Load(qkv + v + i, value);
    Store(value, out + v + i);
  }
}

// The gradient of the normed head: turned back by the angles.
template <typename T, int N>
__device__ void LoadTurned(const T* gradient, const float* angles, int half,
                           float (&lo)[N], float (&hi)[N]) {
  float c[N], s[N];
  Load(gradient, lo);
  Load(gradient + half, hi);
  Load(angles, c);
  Load(angles + half, s);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float a = lo[j], b = hi[j];
    lo[j] = a * c[j] + b * s[j];
    hi[j] = b * c[j] - a * s[j];
  }
}

// Goes over tokens blockIdx.x, + gridDim.x, ...; each lane owns its columns of
// its group's norm gradients.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    Backward(Geometry g, const T* qkv, const bf16* q_norm, const bf16* k_norm,
             const float* inverse_frequencies, const float* rstd,
             float* partial, T* d_qkv) {
  extern __shared__ float4 shared[];
  auto* angles = reinterpret_cast<float*>(shared);
  float* sums = angles + g.d;  // [groups][q, k][d], if there are norms
  const int groups = kThreads / g.lanes, group = threadIdx.x / g.lanes;
  const int lane = threadIdx.x % g.lanes;
  const bool norms = q_norm != nullptr || k_norm != nullptr;
  for (int i = threadIdx.x; norms && i < groups * 2 * g.d; i += kThreads) {
    sums[i] = 0;
  }
  for (int64_t token = blockIdx.x; token < g.tokens; token += gridDim.x) {
    __syncthreads();
    Angles(g, token, inverse_frequencies, angles);
    __syncthreads();
    for (int first = 0; first < g.rotated; first += groups) {
      const int head = first + group;
      const bool active = head < g.rotated, is_k = head >= g.heads;
      const bf16* w = is_k ? k_norm : q_norm;
      const T* x = qkv + token * g.row + static_cast<int64_t>(head) * g.d;
      T* d_x = d_qkv + token * g.row + static_cast<int64_t>(head) * g.d;
      const bool normed = active && w != nullptr;
      float r = 0, mean = 0;
      // With vectors a lane has one of each half and reads it once.
      float lo[N], hi[N], x_lo[N], x_hi[N];
      const auto load = [&](int i) {
        LoadTurned(d_x + i, angles + i, g.half, lo, hi);
        if (!normed) return;
        Load(x + i, x_lo);
        Load(x + g.half + i, x_hi);
      };
      if (N > 1 && active) load(lane * N);
      if (norms) {
        float dot = 0;
        for (int i = lane * N; normed && i < g.half; i += g.lanes * N) {
          float w_lo[N], w_hi[N];
          if (N == 1) load(i);
          Load(w + i, w_lo);
          Load(w + g.half + i, w_hi);
#pragma unroll
          for (int j = 0; j < N; ++j) {
            dot += lo[j] * w_lo[j] * x_lo[j] + hi[j] * w_hi[j] * x_hi[j];
          }
        }
        dot = GroupSum(dot, g.lanes);
        if (normed) r = rstd[token * g.rotated + head];
        mean = r * (r * (r * (dot / static_cast<float>(g.d))));
      }
      float* sum = sums + (group * 2 + (is_k ? 1 : 0)) * g.d;
      for (int i = lane * N; active && i < g.half; i += g.lanes * N) {
        if (N == 1) load(i);
        if (normed) {
          float w_lo[N], w_hi[N];
          Load(w + i, w_lo);
          Load(w + g.half + i, w_hi);
#pragma unroll
          for (int j = 0; j < N; ++j) {
            sum[i + j] += lo[j] * Rounded<T>(x_lo[j] * r);
            sum[g.half + i + j] += hi[j] * Rounded<T>(x_hi[j] * r);
            lo[j] = lo[j] * w_lo[j] * r - x_lo[j] * mean;
            hi[j] = hi[j] * w_hi[j] * r - x_hi[j] * mean;
          }
        }
        Store(lo, d_x + i);
        Store(hi, d_x + g.half + i);
      }
    }
  }
  if (!norms) return;
  __syncthreads();
  for (int c = threadIdx.x; c < 2 * g.d; c += kThreads) {
    float total = 0;
    for (int i = 0; i < groups; ++i) total += sums[i * 2 * g.d + c];
    partial[static_cast<int64_t>(blockIdx.x) * 2 * g.d + c] = total;
  }
}

// With vectors of `n` if the shape allows it, for which lanes is not 32 / n.
Geometry MakeGeometry(const RopeShape& s, bool aligned, int n, bool* vector) {
  Geometry g;
  g.tokens = s.tokens;
  g.sequence = s.sequence;
  g.row = (s.heads + 2 * s.kv_heads) * s.head_dim;
  g.heads = static_cast<int>(s.heads);
  g.rotated = static_cast<int>(s.heads + s.kv_heads);
  g.d = static_cast<int>(s.head_dim);
  g.half = g.d / 2;
  g.first_row = s.first_row;
  const int lanes = g.half / n;
  *vector =
      aligned && g.half % n == 0 && lanes <= 32 && (lanes & (lanes - 1)) == 0;
  g.lanes = *vector ? lanes : 32;
  return g;
}

}  // namespace

template <typename T>
cudaError_t LaunchQkNormRopeForward(const T* qkv, const bf16* q_norm,
                                    const bf16* k_norm, float eps,
                                    const float* inverse_frequencies,
                                    const RopeShape& shape, T* out, float* rstd,
                                    cudaStream_t stream) {
  constexpr int kN = kVector<T>;
  bool vector = false;
  const Geometry g = MakeGeometry(
      shape, IsVector(1, 1, {qkv, q_norm, k_norm, out}), kN, &vector);
  const auto blocks = static_cast<unsigned>(g.tokens);
  const size_t bytes = g.d * sizeof(float);
  if (vector) {
    Forward<T, kN><<<blocks, kThreads, bytes, stream>>>(
        g, qkv, q_norm, k_norm, eps, inverse_frequencies, out, rstd);
  } else {
    Forward<T, 1><<<blocks, kThreads, bytes, stream>>>(
        g, qkv, q_norm, k_norm, eps, inverse_frequencies, out, rstd);
  }
  return cudaGetLastError();
}

template <typename T>
cudaError_t LaunchQkNormRopeBackward(const T* qkv, const bf16* q_norm,
                                     const bf16* k_norm,
                                     const float* inverse_frequencies,
                                     const RopeShape& shape, const float* rstd,
                                     float* partial, T* d_qkv, float* d_q_norm,
                                     float* d_k_norm, cudaStream_t stream) {
  constexpr int kN = kVector<T>;
  bool vector = false;
  const Geometry g = MakeGeometry(
      shape, IsVector(1, 1, {qkv, q_norm, k_norm, d_qkv}), kN, &vector);
  const int64_t parts = GradientParts(g.tokens);
  const bool norms = q_norm != nullptr || k_norm != nullptr;
  // At most 34 KiB: a block's lanes hold kThreads vectors of both halves.
  const size_t bytes =
      (g.d + (norms ? g.groups() * 2 * g.d : 0)) * sizeof(float);
  const auto blocks = static_cast<unsigned>(parts);
  if (vector) {
    Backward<T, kN><<<blocks, kThreads, bytes, stream>>>(
        g, qkv, q_norm, k_norm, inverse_frequencies, rstd, partial, d_qkv);
  } else {
    Backward<T, 1><<<blocks, kThreads, bytes, stream>>>(
        g, qkv, q_norm, k_norm, inverse_frequencies, rstd, partial, d_qkv);
  }
  cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess && q_norm != nullptr) {
    error = LaunchAddPartials(partial, parts, 2 * g.d, g.d, d_q_norm, stream);
  }
  if (error == cudaSuccess && k_norm != nullptr) {
    error =
        LaunchAddPartials(partial + g.d, parts, 2 * g.d, g.d, d_k_norm, stream);
  }
  return error;
}

template cudaError_t LaunchQkNormRopeForward(const float*, const bf16*,
                                             const bf16*, float, const float*,
                                             const RopeShape&, float*, float*,
                                             cudaStream_t);
template cudaError_t LaunchQkNormRopeForward(const bf16*, const bf16*,
                                             const bf16*, float, const float*,
                                             const RopeShape&, bf16*, float*,
                                             cudaStream_t);
template cudaError_t LaunchQkNormRopeBackward(const float*, const bf16*,
                                              const bf16*, const float*,
                                              const RopeShape&, const float*,
                                              float*, float*, float*, float*,
                                              cudaStream_t);
template cudaError_t LaunchQkNormRopeBackward(const bf16*, const bf16*,
                                              const bf16*, const float*,
                                              const RopeShape&, const float*,
                                              float*, bf16*, float*, float*,
                                              cudaStream_t);

}  // namespace slidedp::ops
