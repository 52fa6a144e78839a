// Per-head RMS norm of q and k, then rotation. A block takes a few tokens at a
// time, computes their angles once for all heads, and hands out their heads to
// groups of lanes; a lane keeps its part of both halves of a head in registers,
// and that of the next head as it comes from memory: without that, half of the
// time goes by between a head's loads and the next one's.
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
  __device__ void UnpackFrom(const Geometry& g, int lane,
                             const Pack<T, N> (&packs)[2][kPieces]) {
#pragma unroll
    for (int k = 0; k < kPieces; ++k) {
      if (kPieces > 1 && (lane + k * g.lanes) * N >= g.half) continue;
      Unpack(packs[0][k], lo[k]);
      Unpack(packs[1][k], hi[k]);
    }
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

// A lane's part, as it lies in memory.
template <int N, int kPieces, typename T>
__device__ void FetchPart(const Geometry& g, int lane, const T* from,
                          Pack<T, N> (&to)[2][kPieces]) {
#pragma unroll
  for (int k = 0; k < kPieces; ++k) {
    const int column = (lane + k * g.lanes) * N;
    if (kPieces > 1 && column >= g.half) continue;
    to[0][k] = *reinterpret_cast<const Pack<T, N>*>(from + column);
    to[1][k] = *reinterpret_cast<const Pack<T, N>*>(from + g.half + column);
  }
}

// A head of a token, for a group of lanes: its place in the tokens' rows and
// what the lane fetches ahead of it; zeros if there is none.
template <typename T, int N, int kPieces>
struct Item {
  bool active;
  int t, head;  // of kTokens, of g.rotated
  int64_t token, at;
  Pack<T, N> fetched[2][kPieces];  // of either half

  // Number `index` of the heads [first_head, first_head + heads) of kTokens
  // tokens from `first`.
  __device__ static Item Of(const Geometry& g, int64_t first, int index,
                            int first_head, int heads) {
    Item item = {};
    item.t = index / heads;
    item.head = first_head + index % heads;
    item.token = first + item.t;
    item.active = item.t < kTokens && item.token < g.tokens;
    item.at = item.token * g.row + static_cast<int64_t>(item.head) * g.d;
    return item;
  }
};

// A lane writes only elements that no other lane reads: out may be qkv.
template <typename T, int N, int kPieces>
__global__ void __launch_bounds__(kThreads, kPieces == 1 ? 4 : 1)
    Forward(Geometry g, const T* qkv, const bf16* q_norm, const bf16* k_norm,
            float eps, const float* inverse_frequencies, T* out, float* rstd) {
  extern __shared__ float4 shared[];
  auto* angles = reinterpret_cast<float*>(shared);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTokens;
  const int lane = threadIdx.x % g.lanes, group = threadIdx.x / g.lanes;
  const int groups = kThreads / g.lanes;
  const auto fetch = [&](int begin) {
    auto item = Item<T, N, kPieces>::Of(g, first, begin + group, 0, g.rotated);
    if (item.active) FetchPart(g, lane, qkv + item.at, item.fetched);
    return item;
  };
  auto next = fetch(0);
  Angles(g, first, inverse_frequencies, angles);
  __syncthreads();
  const bool norms = q_norm != nullptr || k_norm != nullptr;
  for (int begin = 0; begin < kTokens * g.rotated; begin += groups) {
    const auto item = next;
    next = fetch(begin + groups);
    const bf16* w = item.head < g.heads ? q_norm : k_norm;
    Part<N, kPieces> x;
    if (item.active) x.UnpackFrom(g, lane, item.fetched);
    if (norms) {
      float sum = 0;
      x.ForEach(g, lane, [&](int, float(&lo)[N], float(&hi)[N]) {
#pragma unroll
        for (int j = 0; j < N; ++j) sum += lo[j] * lo[j] + hi[j] * hi[j];
      });
      sum = GroupSum(sum, g.lanes);
      if (item.active && w != nullptr) {
        const float r = 1.0f / sqrtf(sum / static_cast<float>(g.d) + eps);
        if (lane == 0) rstd[item.token * g.rotated + item.head] = r;
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
    if (!item.active) continue;
    x.Turn(g, lane, angles + item.t * g.d, 1);
    x.StoreTo(g, lane, out + item.at);
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
__global__ void __launch_bounds__(kThreads, kPieces == 1 ? 2 : 1)
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
  Pack<bf16, N> weight[2][kPieces] = {};
  Part<N, kPieces> d_weight;
  if (w != nullptr) FetchPart(g, lane, w, weight);
  // `fetched`: of d_qkv.
  struct GradientItem : Item<T, N, kPieces> {
    Pack<T, N> x[2][kPieces];
    float r;
  };
  const auto fetch = [&](int64_t first, int begin) {
    GradientItem item = {
        Item<T, N, kPieces>::Of(g, first, begin + group, first_head, heads)};
    if (!item.active) return item;
    FetchPart(g, lane, d_qkv + item.at, item.fetched);
    if (w == nullptr) return item;
    FetchPart(g, lane, qkv + item.at, item.x);
    item.r = rstd[item.token * g.rotated + item.head];
    return item;
  };
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kTokens;
  int64_t first = static_cast<int64_t>(blockIdx.x) * kTokens;
  GradientItem next = fetch(first, 0);
  for (; first < g.tokens; first += stride) {
    __syncthreads();
    Angles(g, first, inverse_frequencies, angles);
    __syncthreads();
    for (int begin = 0; begin < kTokens * heads; begin += groups) {
      const GradientItem item = next;
      next = begin + groups < kTokens * heads ? fetch(first, begin + groups)
                                              : fetch(first + stride, 0);
      Part<N, kPieces> d_x, x;
      const float r = item.r;
      if (item.active) {
        d_x.UnpackFrom(g, lane, item.fetched);
        if (w != nullptr) x.UnpackFrom(g, lane, item.x);
        d_x.Turn(g, lane, angles + item.t * g.d, -1);
      }
      if (w != nullptr) {
        float dot = 0;
#pragma unroll
        for (int k = 0; k < kPieces; ++k) {
#pragma unroll
          for (int j = 0; j < N; ++j) {
            d_weight.lo[k][j] += d_x.lo[k][j] * Rounded<T>(x.lo[k][j] * r);
            d_weight.hi[k][j] += d_x.hi[k][j] * Rounded<T>(x.hi[k][j] * r);
            d_x.lo[k][j] *= ToFloat(weight[0][k].v[j]);
            d_x.hi[k][j] *= ToFloat(weight[1][k].v[j]);
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
      if (item.active) d_x.StoreTo(g, lane, d_qkv + item.at);
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
