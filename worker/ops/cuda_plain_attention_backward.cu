#include "worker/ops/cuda_plain_attention.cuh"

namespace slidedp::ops {
namespace {

using namespace plain_attention;  // NOLINT: one file, one subject

// delta[b, head, row] = sum over c of out * d_out. A warp each.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    Delta(Geometry g, const T* out, const T* d_out, float* delta) {
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
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
__device__ void Probabilities(const Geometry& g, const float* q, const float* k,
                              const float* row_lse, const int* first_seen,
                              int64_t query, int64_t key, int pitch,
                              float (*p)[kB + 1]) {
  const int d = static_cast<int>(g.head_dim);
  for (int n = threadIdx.x; n < kB * kB; n += kThreads) {
    const int i = n / kB, j = n % kB;
    p[i][j] =
        Sees(first_seen[i], query + i, key + j)
            ? expf(g.scale * Dot(q + i * pitch, k + j * pitch, d) - row_lse[i])
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
  float* q = shared;               // [kB][pitch]
  float* grad = q + kB * pitch;    // [kB][pitch]: d_out
  float* kv = grad + kB * pitch;   // [kB][pitch]
  float* sum = kv + kB * pitch;    // [kB][pitch]
  __shared__ float p[kB][kB + 1];  // then the scores' gradient
  __shared__ float row_lse[kB], row_delta[kB];
  __shared__ int first_seen[kB];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kB;
  const int64_t head = blockIdx.y, b = blockIdx.z, kv_head = g.kv_head(head);

  LoadTile<kB>(qkv + g.q(b, first, head), g.qkv_stride, first, g, q);
  LoadTile<kB>(d_out + g.out(b, first, head), g.out_stride, first, g, grad);
  LoadFirstSeen<kB>(g, b, first, first_seen);
  for (int i = threadIdx.x; i < kB * pitch; i += kThreads) sum[i] = 0;
  if (threadIdx.x < kB) {
    const bool valid = first + threadIdx.x < g.sequence;
    const int64_t at = g.stat(b, first + threadIdx.x, head);
    row_lse[threadIdx.x] = valid ? lse[at] : 0.0f;
    row_delta[threadIdx.x] = valid ? delta[at] : 0.0f;
  }
  const int64_t last = min(first + kB, g.sequence) - 1;
  for (int64_t key = g.first_key(b, first, kB); key <= last; key += kB) {
    __syncthreads();
    LoadTile<kB>(qkv + g.k(b, key, kv_head), g.qkv_stride, key, g, kv);
    __syncthreads();
    Probabilities<kB>(g, q, kv, row_lse, first_seen, first, key, pitch, p);
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
  float* k = shared;               // [kB][pitch]
  float* v = k + kB * pitch;       // [kB][pitch]
  float* rows = v + kB * pitch;    // [kB][pitch]: q, then d_out, then q
  float* d_k = rows + kB * pitch;  // [kB][pitch]
  float* d_v = d_k + kB * pitch;   // [kB][pitch]
  __shared__ float p[kB][kB + 1], d_s[kB][kB + 1];
  __shared__ float row_lse[kB], row_delta[kB];
  __shared__ int first_seen[kB];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kB;
  const int64_t kv_head = blockIdx.y, b = blockIdx.z;
  const int64_t group = g.heads / g.kv_heads;

  LoadTile<kB>(qkv + g.k(b, first, kv_head), g.qkv_stride, first, g, k);
  LoadTile<kB>(qkv + g.v(b, first, kv_head), g.qkv_stride, first, g, v);
  for (int i = threadIdx.x; i < 2 * kB * pitch; i += kThreads) d_k[i] = 0;
  const int64_t last_key = min(first + kB, g.sequence) - 1;
  const int64_t last =
      g.window == 0 ? g.sequence - 1 : min(last_key + g.window, g.sequence) - 1;
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    for (int64_t query = first; query <= last; query += kB) {
      // Later queries see later documents only.
      if (g.first_seen(b, query) > last_key) break;
      __syncthreads();
      LoadFirstSeen<kB>(g, b, query, first_seen);
      LoadTile<kB>(qkv + g.q(b, query, head), g.qkv_stride, query, g, rows);
      if (threadIdx.x < kB) {
        const bool valid = query + threadIdx.x < g.sequence;
        const int64_t at = g.stat(b, query + threadIdx.x, head);
        row_lse[threadIdx.x] = valid ? lse[at] : 0.0f;
        row_delta[threadIdx.x] = valid ? delta[at] : 0.0f;
      }
      __syncthreads();
      Probabilities<kB>(g, rows, k, row_lse, first_seen, query, first, pitch,
                        p);
      __syncthreads();
      LoadTile<kB>(d_out + g.out(b, query, head), g.out_stride, query, g, rows);
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

template <int kB, typename T>
cudaError_t RunBackward(const T* qkv, const T* out, const float* lse,
                        const T* d_out, const AttentionShape& shape,
                        float* delta, T* d_qkv, cudaStream_t stream) {
  const Geometry g = MakeGeometry(shape);
  cudaError_t error = Launch(&Delta<T>, Grid(shape, kThreads / 32, shape.heads),
                             0, stream, g, out, d_out, delta);
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
cudaError_t PlainAttentionBackward(const T* qkv, const T* out, const float* lse,
                                   const T* d_out, const AttentionShape& shape,
                                   float* delta, T* d_qkv,
                                   cudaStream_t stream) {
  if (shape.head_dim <= 128) {
    return RunBackward<32>(qkv, out, lse, d_out, shape, delta, d_qkv, stream);
  }
  if (shape.head_dim <= 256) {
    return RunBackward<16>(qkv, out, lse, d_out, shape, delta, d_qkv, stream);
  }
  return RunBackward<8>(qkv, out, lse, d_out, shape, delta, d_qkv, stream);
}

template cudaError_t PlainAttentionBackward(const float*, const float*,
                                            const float*, const float*,
                                            const AttentionShape&, float*,
                                            float*, cudaStream_t);
template cudaError_t PlainAttentionBackward(const bf16*, const bf16*,
                                            const float*, const bf16*,
                                            const AttentionShape&, float*,
                                            bf16*, cudaStream_t);

}  // namespace slidedp::ops
