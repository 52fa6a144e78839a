// Per-head RMS norm of q and k, then rotation. A block takes a few tokens at a
// time, computes their angles once for all heads, and hands out their heads to
// groups of lanes; a lane keeps its part of both halves of a head in registers.
// With BF16 activations a normed head is rounded before and after its weight,
// as the models' own code does; cosines and sines stay float32.
#include "worker/ops/cuda_elements.cuh"
#include "worker/ops/cuda_kernels.h"

namespace slidedp::ops {
namespace {

using namespace cuda;  // NOLINT: one file, one subject

constexpr int kThreads = 256;
constexpr int kTokens = 4;  // of a block at a time
constexpr int kWarp = 32;

struct Geometry {
  int64_t tokens, sequence, row;  // row: elements of a token
  int heads, rotated, d, half;
  int lanes;                 // of a group; a power of two
  const int32_t* first_row;  // of each token's document; null: its sequence's

  int groups() const { return kThreads / lanes; }
};

// Of kTokens tokens from `first`: cosines [half], sines [half] each.
__device__ void Angles(const Geometry& g, int64_t first,
                       const float* inverse_frequencies, float* angles) {
  for (int i = threadIdx.x; i < kTokens * g.half; i += kThreads) {
    const int t = i / g.half, column = i % g.half;
    const int64_t token = first + t;
    if (token >= g.tokens) return;
    const auto position =
        static_cast<float>(g.first_row == nullptr ? token % g.sequence
                                                  : token - g.first_row[token]);
    // The product is rounded, never fused: far angles depend on it.
    sincosf(__fmul_rn(position, inverse_frequencies[column]),
            angles + t * g.d + g.half + column, angles + t * g.d + column);
  }
}

__device__ float GroupSum(float x, int lanes) {
  for (int step = lanes / 2; step > 0; step /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, step);
  }
  return x;
}

// A lane's part of a head, or of what goes with one: kPieces times N elements
// of either half, every `lanes` * N.
template <int N, int kPieces>
struct Part {
  float lo[kPieces][N] = {}, hi[kPieces][N] = {};

  // of(column, lo, hi) for each piece that exists.
  template <typename Of>
  __device__ void ForEach(const Geometry& g, int lane, const Of& of) {
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      const int column = (lane + k * g.lanes) * N;
      if (kPieces == 1 || column < g.half) of(column, lo[k], hi[k]);
    }
  }
  template <typename T>
  __device__ void LoadFrom(const Geometry& g, int lane, const T* from) {
    ForEach(g, lane, [&](int column, float(&lo)[N], float(&hi)[N]) {
      Load(from + column, lo);
      Load(from + g.half + column, hi);
    });
  }
  template <typename T>
  __device__ void StoreTo(const Geometry& g, int lane, T* to) {
    ForEach(g, lane, [&](int column, float(&lo)[N], float(&hi)[N]) {
      Store(lo, to + column);
      Store(hi, to + g.half + column);
    });
  }
  // Turned by the angles, or back by them.
  __device__ void Turn(const Geometry& g, int lane, const float* angles,
                       float direction) {
    ForEach(g, lane, [&](int column, float(&lo)[N], float(&hi)[N]) {
      float c[N], s[N];
      Load(angles + column, c);
      Load(angles + g.half + column, s);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float a = lo[j], b = hi[j], sine = direction * s[j];
        lo[j] = a * c[j] - b * sine;
        hi[j] = b * c[j] + a * sine;
      }
    });
  }
};

// A lane writes only elements that no other lane reads: out may be qkv.
template <typename T, int N, int kPieces>
__global__ void __launch_bounds__(kThreads)
    Forward(Geometry g, const T* qkv, const bf16* q_norm, const bf16* k_norm,
            float eps, const float* inverse_frequencies, T* out, float* rstd) {
  extern __shared__ float4 shared[];
  auto* angles = reinterpret_cast<float*>(shared);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTokens;
  Angles(g, first, inverse_frequencies, angles);
  __syncthreads();
  const int lane = threadIdx.x % g.lanes, groups = kThreads / g.lanes;
  const bool norms = q_norm != nullptr || k_norm != nullptr;
  for (int begin = 0; begin < kTokens * g.rotated; begin += groups) {
    const int item = begin + threadIdx.x / g.lanes;
    const int t = item / g.rotated, head = item % g.rotated;
    const int64_t token = first + t;
    const bool active = t < kTokens && token < g.tokens;
    const bf16* w = head < g.heads ? q_norm : k_norm;
    const int64_t at = token * g.row + static_cast<int64_t>(head) * g.d;
    Part<N, kPieces> x;
    if (active) x.LoadFrom(g, lane, qkv + at);
    if (norms) {
      float sum = 0;
      x.ForEach(g, lane, [&](int, float(&lo)[N], float(&hi)[N]) {
#pragma unroll
        for (int j = 0; j < N; ++j) sum += lo[j] * lo[j] + hi[j] * hi[j];
      });
      sum = GroupSum(sum, g.lanes);
      if (active && w != nullptr) {
        const float r = 1.0f / sqrtf(sum / static_cast<float>(g.d) + eps);
        if (lane == 0) rstd[token * g.rotated + head] = r;
        x.ForEach(g, lane, [&](int column, float(&lo)[N], float(&hi)[N]) {
          float w_lo[N], w_hi[N];
          Load(w + column, w_lo);
          Load(w + g.half + column, w_hi);
#pragma unroll
          for (int j = 0; j < N; ++j) {
            lo[j] = Rounded<T>(Rounded<T>(lo[j] * r) * w_lo[j]);
            hi[j] = Rounded<T>(Rounded<T>(hi[j] * r) * w_hi[j]);
          }
        });
      }
    }
    if (!active) continue;
    x.Turn(g, lane, angles + t * g.d, 1);
    x.StoreTo(g, lane, out + at);
  }
  if (out == qkv) return;
  const int64_t v = static_cast<int64_t>(g.rotated) * g.d;
  for (int t = 0; t < kTokens && first + t < g.tokens; ++t) {
    const int64_t at = (first + t) * g.row;
    for (int64_t i = v + threadIdx.x * N; i < g.row; i += kThreads * N) {
      float value[N];
      Load(qkv + at + i, value);
      Store(value, out + at + i);
    }
  }
}

// blockIdx.y: the heads of q, or of k. Goes over kTokens tokens from those of
// blockIdx.x on, every gridDim.x; each lane sums the norm gradient of its own
// columns.
template <typename T, int N, int kPieces>
__global__ void __launch_bounds__(kThreads)
    Backward(Geometry g, const T* qkv, const bf16* q_norm, const bf16* k_norm,
             const float* inverse_frequencies, const float* rstd,
             float* partial, T* d_qkv) {
  extern __shared__ float4 shared[];
  auto* angles = reinterpret_cast<float*>(shared);
  const int groups = kThreads / g.lanes, group = threadIdx.x / g.lanes;
  const int lane = threadIdx.x % g.lanes;
  const bool is_k = blockIdx.y == 1;
  const bf16* w = is_k ? k_norm : q_norm;
  const int heads = is_k ? g.rotated - g.heads : g.heads;
  const int first_head = is_k ? g.heads : 0;
  Part<N, kPieces> weight, d_weight;
  if (w != nullptr) weight.LoadFrom(g, lane, w);
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kTokens;
       first < g.tokens; first += static_cast<int64_t>(gridDim.x) * kTokens) {
    __syncthreads();
    Angles(g, first, inverse_frequencies, angles);
    __syncthreads();
    for (int begin = 0; begin < kTokens * heads; begin += groups) {
      const int item = begin + group;
      const int t = item / heads, head = first_head + item % heads;
      const int64_t token = first + t;
      const bool active = t < kTokens && token < g.tokens;
      const int64_t at = token * g.row + static_cast<int64_t>(head) * g.d;
      Part<N, kPieces> d_x, x;
      float r = 0;
      if (active) {
        d_x.LoadFrom(g, lane, d_qkv + at);
        if (w != nullptr) {
          x.LoadFrom(g, lane, qkv + at);
          r = rstd[token * g.rotated + head];
        }
        d_x.Turn(g, lane, angles + t * g.d, -1);
      }
      if (w != nullptr) {
        float dot = 0;
#pragma unroll
        for (int k = 0; k < kPieces; ++k) {
#pragma unroll
          for (int j = 0; j < N; ++j) {
            d_weight.lo[k][j] += d_x.lo[k][j] * Rounded<T>(x.lo[k][j] * r);
            d_weight.hi[k][j] += d_x.hi[k][j] * Rounded<T>(x.hi[k][j] * r);
            d_x.lo[k][j] *= weight.lo[k][j];
            d_x.hi[k][j] *= weight.hi[k][j];
            dot += d_x.lo[k][j] * x.lo[k][j] + d_x.hi[k][j] * x.hi[k][j];
          }
        }
        dot = GroupSum(dot, g.lanes);
        const float mean = r * (r * (r * (dot / static_cast<float>(g.d))));
#pragma unroll
        for (int k = 0; k < kPieces; ++k) {
#pragma unroll
          for (int j = 0; j < N; ++j) {
            d_x.lo[k][j] = d_x.lo[k][j] * r - x.lo[k][j] * mean;
            d_x.hi[k][j] = d_x.hi[k][j] * r - x.hi[k][j] * mean;
          }
        }
      }
      if (active) d_x.StoreTo(g, lane, d_qkv + at);
    }
  }
  if (w == nullptr) return;
  float* sums = angles + kTokens * g.d;  // [groups][d]
  d_weight.StoreTo(g, lane, sums + group * g.d);
  __syncthreads();
  for (int c = threadIdx.x; c < g.d; c += kThreads) {
    float total = 0;
    for (int i = 0; i < groups; ++i) total += sums[i * g.d + c];
    partial[(static_cast<int64_t>(blockIdx.x) * 2 + blockIdx.y) * g.d + c] =
        total;
  }
}

// With vectors of `n` if a group of lanes then has a head at once, else with
// kPieces single elements of either half a lane.
constexpr int kPieces = kMaxRopeHeadDim / 2 / kWarp;
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
  *vector = aligned && g.half % n == 0 && lanes <= kWarp &&
            (lanes & (lanes - 1)) == 0;
  g.lanes = *vector ? lanes : kWarp;
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
  const auto blocks = static_cast<unsigned>(CeilDiv(g.tokens, kTokens));
  const size_t bytes = kTokens * g.d * sizeof(float);
  if (vector) {
    Forward<T, kN, 1><<<blocks, kThreads, bytes, stream>>>(
        g, qkv, q_norm, k_norm, eps, inverse_frequencies, out, rstd);
  } else {
    Forward<T, 1, kPieces><<<blocks, kThreads, bytes, stream>>>(
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
  // At most 24 KiB: a block's lanes hold kThreads vectors of both halves.
  const size_t bytes =
      (kTokens + (norms ? g.groups() : 0)) * g.d * sizeof(float);
  const dim3 blocks(static_cast<unsigned>(parts), 2);
  if (vector) {
    Backward<T, kN, 1><<<blocks, kThreads, bytes, stream>>>(
        g, qkv, q_norm, k_norm, inverse_frequencies, rstd, partial, d_qkv);
  } else {
    Backward<T, 1, kPieces><<<blocks, kThreads, bytes, stream>>>(
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
