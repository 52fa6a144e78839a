// What the plain attention kernels share. One block of threads per block of kB
// query rows (or key rows, for d_k and d_v) of a head; tiles [kB][head_dim] in
// shared memory, a float of padding per row so that columns of rows lie in
// different banks. Every sum has one owner and one order.
#pragma once

#include <cmath>
#include <cstdint>

#include "worker/ops/cuda_plain_attention.h"

namespace slidedp::ops::plain_attention {

inline constexpr int kThreads = 256;

inline __device__ float Load(float x) { return x; }
inline __device__ float Load(bf16 x) {
  return __uint_as_float(static_cast<unsigned>(x) << 16);
}
inline __device__ void Store(float x, float* out) { *out = x; }
// Nearest, ties to even; NaN stays NaN.
inline __device__ void Store(float x, bf16* out) {
  const unsigned bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    *out = static_cast<bf16>((bits >> 16) | 0x40u);
  } else {
    *out = static_cast<bf16>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
}

struct Geometry {
  int64_t sequence, heads, kv_heads, head_dim, window;
  int64_t qkv_stride, out_stride;
  float scale;
  const int32_t* first_row;  // of each row's document; null: its sequence's

  __device__ int64_t kv_head(int64_t head) const {
    return head / (heads / kv_heads);
  }
  // Element offsets of a row's head in the fused buffer and in out.
  __device__ int64_t q(int64_t b, int64_t row, int64_t head) const {
    return (b * sequence + row) * qkv_stride + head * head_dim;
  }
  __device__ int64_t k(int64_t b, int64_t row, int64_t kv) const {
    return q(b, row, heads + kv);
  }
  __device__ int64_t v(int64_t b, int64_t row, int64_t kv) const {
    return q(b, row, heads + kv_heads + kv);
  }
  __device__ int64_t out(int64_t b, int64_t row, int64_t head) const {
    return (b * sequence + row) * out_stride + head * head_dim;
  }
  __device__ int64_t stat(int64_t b, int64_t row, int64_t head) const {
    return (b * heads + head) * sequence + row;
  }
  // The first key that `query` (in the sequence) sees; ascends with it.
  __device__ int64_t first_seen(int64_t b, int64_t query) const {
    const int64_t start = first_row == nullptr
                              ? 0
                              : first_row[b * sequence + query] - b * sequence;
    return window == 0 ? start : max(start, query - window + 1);
  }
  // The first row of the block of keys that queries from `query` on see.
  __device__ int64_t first_key(int64_t b, int64_t query, int64_t block) const {
    return first_seen(b, query) / block * block;
  }
};

// tile[i][c] = rows first + i of `data`; 0 beyond the sequence.
template <int kB, typename T>
inline __device__ void LoadTile(const T* data, int64_t stride, int64_t first,
                                const Geometry& g, float* tile) {
  const int d = static_cast<int>(g.head_dim);
  for (int i = threadIdx.x; i < kB * d; i += kThreads) {
    const int row = i / d, c = i % d;
    tile[row * (d + 1) + c] =
        first + row < g.sequence ? Load(data[row * stride + c]) : 0.0f;
  }
}

// first[i] = first key that row `row` + i sees, which is none beyond the
// sequence. A query sees the keys from there to itself.
template <int kB>
inline __device__ void LoadFirstSeen(const Geometry& g, int64_t b, int64_t row,
                                     int* first) {
  if (threadIdx.x >= kB) return;
  const int64_t query = row + threadIdx.x;
  first[threadIdx.x] =
      static_cast<int>(query < g.sequence ? g.first_seen(b, query) : INT32_MAX);
}
inline __device__ bool Sees(int first, int64_t query, int64_t key) {
  return key >= first && key <= query;
}

inline __device__ float Dot(const float* a, const float* b, int d) {
  float sum = 0;
  for (int c = 0; c < d; ++c) sum += a[c] * b[c];
  return sum;
}

inline Geometry MakeGeometry(const AttentionShape& s) {
  return {s.sequence,
          s.heads,
          s.kv_heads,
          s.head_dim,
          s.window,
          s.qkv_dim(),
          s.heads * s.head_dim,
          static_cast<float>(1.0 / std::sqrt(static_cast<double>(s.head_dim))),
          s.documents.first_row};
}

// `tiles` tiles fit 99 KiB, the smallest shared memory of a block on any GPU
// that this code is built for.
template <int kB>
size_t TileBytes(const Geometry& g, int tiles) {
  return sizeof(float) * tiles * kB * (g.head_dim + 1);
}

inline dim3 Grid(const AttentionShape& s, int64_t rows, int64_t heads) {
  return dim3(static_cast<unsigned>((s.sequence + rows - 1) / rows),
              static_cast<unsigned>(heads), static_cast<unsigned>(s.batch));
}

template <typename... Parameters, typename... Arguments>
cudaError_t Launch(void (*kernel)(Parameters...), dim3 grid, size_t bytes,
                   cudaStream_t stream, Arguments... arguments) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  kernel<<<grid, kThreads, bytes, stream>>>(arguments...);
  return cudaGetLastError();
}

}  // namespace slidedp::ops::plain_attention
