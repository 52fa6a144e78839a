// One block of threads per block of kB query rows (or key rows, for d_k and
// d_v) of a head; tiles [kB][head_dim] in shared memory, a float of padding per
// row so that columns of rows lie in different banks. Every sum has one owner
// and one order.
#include <cmath>

#include "worker/ops/cuda_plain_attention.h"

namespace slidedp::ops {
namespace {

constexpr int kThreads = 256;

__device__ float Load(float x) { return x; }
__device__ float Load(bf16 x) {
  return __uint_as_float(static_cast<unsigned>(x) << 16);
}
__device__ void Store(float x, float* out) { *out = x; }
// Nearest, ties to even; NaN stays NaN.
__device__ void Store(float x, bf16* out) {
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
  __device__ bool sees(int64_t query, int64_t key) const {
    return query < sequence && key <= query &&
           (window == 0 || key > query - window);
  }
  // First key block that a query from `row` on may see.
  __device__ int64_t first_key(int64_t row, int64_t block) const {
    if (window == 0 || row < window) return 0;
    return (row - window + 1) / block * block;
  }
};

// tile[i][c] = rows first + i of `data`; 0 beyond the sequence.
template <int kB, typename T>
__device__ void LoadTile(const T* data, int64_t stride, int64_t first,
                         const Geometry& g, float* tile) {
  const int d = static_cast<int>(g.head_dim);
  for (int i = threadIdx.x; i < kB * d; i += kThreads) {
    const int row = i / d, c = i % d;
    tile[row * (d + 1) + c] = first + row < g.sequence
                                  ? Load(data[row * stride + c])
                                  : 0.0f;
  }
}

__device__ float Dot(const float* a, const float* b, int d) {
  float sum = 0;
  for (int c = 0; c < d; ++c) sum += a[c] * b[c];
  return sum;
}

template <int kB, typename T>
__global__ void __launch_bounds__(kThreads)
    Forward(Geometry g, const T* qkv, T* out, float* lse) {
  extern __shared__ float shared[];
  const int d = static_cast<int>(g.head_dim);
  const int pitch = d + 1;
  float* q = shared;             // [kB][pitch]
  float* kv = q + kB * pitch;    // [kB][pitch]: keys, then values
  float* sum = kv + kB * pitch;  // [kB][pitch]
  __shared__ float p[kB][kB + 1];
  __shared__ float row_max[kB], row_sum[kB], factor[kB];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kB;
  const int64_t head = blockIdx.y, b = blockIdx.z, kv_head = g.kv_head(head);

  LoadTile<kB>(qkv + g.q(b, first, head), g.qkv_stride, first, g, q);
  for (int i = threadIdx.x; i < kB * pitch; i += kThreads) sum[i] = 0;
  if (threadIdx.x < kB) {
    row_max[threadIdx.x] = -INFINITY;
    row_sum[threadIdx.x] = 0;
  }
  const int64_t last = min(first + kB, g.sequence) - 1;
  for (int64_t key = g.first_key(first, kB); key <= last; key += kB) {
    __syncthreads();
    LoadTile<kB>(qkv + g.k(b, key, kv_head), g.qkv_stride, key, g, kv);
    __syncthreads();
    for (int n = threadIdx.x; n < kB * kB; n += kThreads) {
      const int i = n / kB, j = n % kB;
      p[i][j] = g.sees(first + i, key + j)
                    ? g.scale * Dot(q + i * pitch, kv + j * pitch, d)
                    : -INFINITY;
    }
    __syncthreads();
    if (threadIdx.x < kB) {
      const int i = threadIdx.x;
      float top = row_max[i];
      for (int j = 0; j < kB; ++j) top = fmaxf(top, p[i][j]);
      // A row that has seen no key yet keeps its zeros.
      const bool seen = top != -INFINITY;
      factor[i] = seen ? expf(row_max[i] - top) : 1.0f;
      float total = row_sum[i] * factor[i];
      for (int j = 0; j < kB; ++j) {
        p[i][j] = seen ? expf(p[i][j] - top) : 0.0f;
        total += p[i][j];
      }
      row_max[i] = top;
      row_sum[i] = total;
    }
    LoadTile<kB>(qkv + g.v(b, key, kv_head), g.qkv_stride, key, g, kv);
    __syncthreads();
    for (int n = threadIdx.x; n < kB * d; n += kThreads) {
      const int i = n / d, c = n % d;
      float value = sum[i * pitch + c] * factor[i];
      for (int j = 0; j < kB; ++j) value += p[i][j] * kv[j * pitch + c];
      sum[i * pitch + c] = value;
    }
  }
  __syncthreads();
  for (int n = threadIdx.x; n < kB * d; n += kThreads) {
    const int i = n / d, c = n % d;
    if (first + i > last) continue;
    Store(sum[i * pitch + c] / row_sum[i],
          out + g.out(b, first + i, head) + c);
  }
  if (threadIdx.x < kB && first + threadIdx.x <= last) {
    lse[g.stat(b, first + threadIdx.x, head)] =
        row_max[threadIdx.x] + logf(row_sum[threadIdx.x]);
  }
}

// delta[b, head, row] = sum over c of out * d_out. A warp each.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    Delta(Geometry g, const T* out, const T* d_out, float* delta) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) +
                      threadIdx.x / 32;
  const int64_t head = blockIdx.y, b = blockIdx.z;
  if (row >= g.sequence) return;
  const int64_t at = g.out(b, row, head);
  float sum = 0;
  for (int64_t c = threadIdx.x % 32; c < g.head_dim; c += 32) {
    sum += Load(out[at + c]) * Load(d_out[at + c]);
  }
  for (int step = 16; step > 0; step /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, step);
  }
  if (threadIdx.x % 32 == 0) delta[g.stat(b, row, head)] = sum;
}

// p[i][j] = softmax of the scores of query i and key j, 0 where it sees none.
template <int kB>
__device__ void Probabilities(const Geometry& g, const float* q,
                              const float* k, const float* row_lse,
                              int64_t query, int64_t key, int pitch,
                              float (*p)[kB + 1]) {
  const int d = static_cast<int>(g.head_dim);
  for (int n = threadIdx.x; n < kB * kB; n += kThreads) {
    const int i = n / kB, j = n % kB;
    p[i][j] = g.sees(query + i, key + j)
                  ? expf(g.scale * Dot(q + i * pitch, k + j * pitch, d) -
                         row_lse[i])
                  : 0.0f;
  }
}

template <int kB, typename T>
__global__ void __launch_bounds__(kThreads)
    BackwardQuery(Geometry g, const T* qkv, const float* lse, const T* d_out,
                  const float* delta, T* d_qkv) {
  extern __shared__ float shared[];
  const int d = static_cast<int>(g.head_dim);
  const int pitch = d + 1;
  float* q = shared;                // [kB][pitch]
  float* grad = q + kB * pitch;     // [kB][pitch]: d_out
  float* kv = grad + kB * pitch;    // [kB][pitch]
  float* sum = kv + kB * pitch;     // [kB][pitch]
  __shared__ float p[kB][kB + 1];   // then the scores' gradient
  __shared__ float row_lse[kB], row_delta[kB];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kB;
  const int64_t head = blockIdx.y, b = blockIdx.z, kv_head = g.kv_head(head);

  LoadTile<kB>(qkv + g.q(b, first, head), g.qkv_stride, first, g, q);
  LoadTile<kB>(d_out + g.out(b, first, head), g.out_stride, first, g, grad);
  for (int i = threadIdx.x; i < kB * pitch; i += kThreads) sum[i] = 0;
  if (threadIdx.x < kB) {
    const bool valid = first + threadIdx.x < g.sequence;
    const int64_t at = g.stat(b, first + threadIdx.x, head);
    row_lse[threadIdx.x] = valid ? lse[at] : 0.0f;
    row_delta[threadIdx.x] = valid ? delta[at] : 0.0f;
  }
  const int64_t last = min(first + kB, g.sequence) - 1;
  for (int64_t key = g.first_key(first, kB); key <= last; key += kB) {
    __syncthreads();
    LoadTile<kB>(qkv + g.k(b, key, kv_head), g.qkv_stride, key, g, kv);
    __syncthreads();
    Probabilities<kB>(g, q, kv, row_lse, first, key, pitch, p);
    __syncthreads();
    LoadTile<kB>(qkv + g.v(b, key, kv_head), g.qkv_stride, key, g, kv);
    __syncthreads();
    for (int n = threadIdx.x; n < kB * kB; n += kThreads) {
      const int i = n / kB, j = n % kB;
      const float d_p = Dot(grad + i * pitch, kv + j * pitch, d);
      p[i][j] *= (d_p - row_delta[i]) * g.scale;
    }
    __syncthreads();
    LoadTile<kB>(qkv + g.k(b, key, kv_head), g.qkv_stride, key, g, kv);
    __syncthreads();
    for (int n = threadIdx.x; n < kB * d; n += kThreads) {
      const int i = n / d, c = n % d;
      float value = sum[i * pitch + c];
      for (int j = 0; j < kB; ++j) value += p[i][j] * kv[j * pitch + c];
      sum[i * pitch + c] = value;
    }
  }
  __syncthreads();
  for (int n = threadIdx.x; n < kB * d; n += kThreads) {
    const int i = n / d, c = n % d;
    if (first + i > last) continue;
    Store(sum[i * pitch + c], d_qkv + g.q(b, first + i, head) + c);
  }
}

// Heads of a group in ascending order, then queries.
template <int kB, typename T>
__global__ void __launch_bounds__(kThreads)
    BackwardKey(Geometry g, const T* qkv, const float* lse, const T* d_out,
                const float* delta, T* d_qkv) {
  extern __shared__ float shared[];
  const int d = static_cast<int>(g.head_dim);
  const int pitch = d + 1;
  float* k = shared;                 // [kB][pitch]
  float* v = k + kB * pitch;         // [kB][pitch]
  float* rows = v + kB * pitch;      // [kB][pitch]: q, then d_out, then q
  float* d_k = rows + kB * pitch;    // [kB][pitch]
  float* d_v = d_k + kB * pitch;     // [kB][pitch]
  __shared__ float p[kB][kB + 1], d_s[kB][kB + 1];
  __shared__ float row_lse[kB], row_delta[kB];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kB;
  const int64_t kv_head = blockIdx.y, b = blockIdx.z;
  const int64_t group = g.heads / g.kv_heads;

  LoadTile<kB>(qkv + g.k(b, first, kv_head), g.qkv_stride, first, g, k);
  LoadTile<kB>(qkv + g.v(b, first, kv_head), g.qkv_stride, first, g, v);
  for (int i = threadIdx.x; i < 2 * kB * pitch; i += kThreads) d_k[i] = 0;
  const int64_t last_key = min(first + kB, g.sequence) - 1;
  const int64_t last = g.window == 0
                           ? g.sequence - 1
                           : min(last_key + g.window, g.sequence) - 1;
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    for (int64_t query = first; query <= last; query += kB) {
      __syncthreads();
      LoadTile<kB>(qkv + g.q(b, query, head), g.qkv_stride, query, g, rows);
      if (threadIdx.x < kB) {
        const bool valid = query + threadIdx.x < g.sequence;
        const int64_t at = g.stat(b, query + threadIdx.x, head);
        row_lse[threadIdx.x] = valid ? lse[at] : 0.0f;
        row_delta[threadIdx.x] = valid ? delta[at] : 0.0f;
      }
      __syncthreads();
      Probabilities<kB>(g, rows, k, row_lse, query, first, pitch, p);
      __syncthreads();
      LoadTile<kB>(d_out + g.out(b, query, head), g.out_stride, query, g,
                   rows);
      __syncthreads();
      for (int n = threadIdx.x; n < kB * kB; n += kThreads) {
        const int i = n / kB, j = n % kB;
        const float d_p = Dot(rows + i * pitch, v + j * pitch, d);
        d_s[i][j] = p[i][j] * (d_p - row_delta[i]) * g.scale;
      }
      for (int n = threadIdx.x; n < kB * d; n += kThreads) {
        const int j = n / d, c = n % d;
        float value = d_v[j * pitch + c];
        for (int i = 0; i < kB; ++i) value += p[i][j] * rows[i * pitch + c];
        d_v[j * pitch + c] = value;
      }
      __syncthreads();
      LoadTile<kB>(qkv + g.q(b, query, head), g.qkv_stride, query, g, rows);
      __syncthreads();
      for (int n = threadIdx.x; n < kB * d; n += kThreads) {
        const int j = n / d, c = n % d;
        float value = d_k[j * pitch + c];
        for (int i = 0; i < kB; ++i) value += d_s[i][j] * rows[i * pitch + c];
        d_k[j * pitch + c] = value;
      }
    }
  }
  __syncthreads();
  for (int n = threadIdx.x; n < kB * d; n += kThreads) {
    const int j = n / d, c = n % d;
    if (first + j > last_key) continue;
    Store(d_k[j * pitch + c], d_qkv + g.k(b, first + j, kv_head) + c);
    Store(d_v[j * pitch + c], d_qkv + g.v(b, first + j, kv_head) + c);
  }
}

Geometry MakeGeometry(const AttentionShape& s) {
  return {s.sequence,
          s.heads,
          s.kv_heads,
          s.head_dim,
          s.window,
          s.qkv_dim(),
          s.heads * s.head_dim,
          static_cast<float>(1.0 / std::sqrt(static_cast<double>(s.head_dim)))};
}

// `tiles` tiles fit 99 KiB, the smallest shared memory of a block on any GPU
// that this code is built for.
template <int kB>
size_t TileBytes(const Geometry& g, int tiles) {
  return sizeof(float) * tiles * kB * (g.head_dim + 1);
}

dim3 Grid(const AttentionShape& s, int64_t rows, int64_t heads) {
  return dim3(static_cast<unsigned>((s.sequence + rows - 1) / rows),
              static_cast<unsigned>(heads), static_cast<unsigned>(s.batch));
}

template <typename... Parameters, typename... Arguments>
cudaError_t Launch(void (*kernel)(Parameters...), dim3 grid, size_t bytes,
                   cudaStream_t stream, Arguments... arguments) {
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
      static_cast<int>(bytes));
  if (error != cudaSuccess) return error;
  kernel<<<grid, kThreads, bytes, stream>>>(arguments...);
  return cudaGetLastError();
}

template <int kB, typename T>
cudaError_t RunForward(const T* qkv, const AttentionShape& shape, T* out,
                       float* lse, cudaStream_t stream) {
  const Geometry g = MakeGeometry(shape);
  return Launch(&Forward<kB, T>, Grid(shape, kB, shape.heads),
                TileBytes<kB>(g, 3), stream, g, qkv, out, lse);
}

template <int kB, typename T>
cudaError_t RunBackward(const T* qkv, const T* out, const float* lse,
                        const T* d_out, const AttentionShape& shape,
                        float* delta, T* d_qkv, cudaStream_t stream) {
  const Geometry g = MakeGeometry(shape);
  cudaError_t error =
      Launch(&Delta<T>, Grid(shape, kThreads / 32, shape.heads), 0, stream, g,
             out, d_out, delta);
  if (error != cudaSuccess) return error;
  const float* const_delta = delta;
  error = Launch(&BackwardQuery<kB, T>, Grid(shape, kB, shape.heads),
                 TileBytes<kB>(g, 4), stream, g, qkv, lse, d_out, const_delta,
                 d_qkv);
  if (error != cudaSuccess) return error;
  return Launch(&BackwardKey<kB, T>, Grid(shape, kB, shape.kv_heads),
                TileBytes<kB>(g, 5), stream, g, qkv, lse, d_out, const_delta,
                d_qkv);
}

}  // namespace

template <typename T>
cudaError_t PlainAttentionForward(const T* qkv, const AttentionShape& shape,
                                  T* out, float* lse, cudaStream_t stream) {
  if (shape.head_dim <= 128) {
    return RunForward<32>(qkv, shape, out, lse, stream);
  }
  if (shape.head_dim <= 256) {
    return RunForward<16>(qkv, shape, out, lse, stream);
  }
  return RunForward<8>(qkv, shape, out, lse, stream);
}

template <typename T>
cudaError_t PlainAttentionBackward(const T* qkv, const T* out,
                                   const float* lse, const T* d_out,
                                   const AttentionShape& shape, float* delta,
                                   T* d_qkv, cudaStream_t stream) {
  if (shape.head_dim <= 128) {
    return RunBackward<32>(qkv, out, lse, d_out, shape, delta, d_qkv, stream);
  }
  if (shape.head_dim <= 256) {
    return RunBackward<16>(qkv, out, lse, d_out, shape, delta, d_qkv, stream);
  }
  return RunBackward<8>(qkv, out, lse, d_out, shape, delta, d_qkv, stream);
}

template cudaError_t PlainAttentionForward(const float*, const AttentionShape&,
                                           float*, float*, cudaStream_t);
template cudaError_t PlainAttentionForward(const bf16*, const AttentionShape&,
                                           bf16*, float*, cudaStream_t);
template cudaError_t PlainAttentionBackward(const float*, const float*,
                                            const float*, const float*,
                                            const AttentionShape&, float*,
                                            float*, cudaStream_t);
template cudaError_t PlainAttentionBackward(const bf16*, const bf16*,
                                            const float*, const bf16*,
                                            const AttentionShape&, float*,
                                            bf16*, cudaStream_t);

}  // namespace slidedp::ops
