#include "worker/ops/cuda_plain_attention.cuh"

namespace slidedp::ops {
namespace {

using namespace plain_attention;  // NOLINT: one file, one subject

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
  __shared__ int first_seen[kB];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kB;
  const int64_t head = blockIdx.y, b = blockIdx.z, kv_head = g.kv_head(head);

  LoadTile<kB>(qkv + g.q(b, first, head), g.qkv_stride, first, g, q);
  LoadFirstSeen<kB>(g, b, first, first_seen);
  for (int i = threadIdx.x; i < kB * pitch; i += kThreads) sum[i] = 0;
  if (threadIdx.x < kB) {
    row_max[threadIdx.x] = -INFINITY;
    row_sum[threadIdx.x] = 0;
  }
  const int64_t last = min(first + kB, g.sequence) - 1;
  for (int64_t key = g.first_key(b, first, kB); key <= last; key += kB) {
    __syncthreads();
    LoadTile<kB>(qkv + g.k(b, key, kv_head), g.qkv_stride, key, g, kv);
    __syncthreads();
    for (int n = threadIdx.x; n < kB * kB; n += kThreads) {
      const int i = n / kB, j = n % kB;
      p[i][j] = Sees(first_seen[i], first + i, key + j)
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
    Store(sum[i * pitch + c] / row_sum[i], out + g.out(b, first + i, head) + c);
  }
  if (threadIdx.x < kB && first + threadIdx.x <= last) {
    lse[g.stat(b, first + threadIdx.x, head)] =
        row_max[threadIdx.x] + logf(row_sum[threadIdx.x]);
  }
}

template <int kB, typename T>
cudaError_t RunForward(const T* qkv, const AttentionShape& shape, T* out,
                       float* lse, cudaStream_t stream) {
  const Geometry g = MakeGeometry(shape);
  return Launch(&Forward<kB, T>, Grid(shape, kB, shape.heads),
                TileBytes<kB>(g, 3), stream, g, qkv, out, lse);
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

template cudaError_t PlainAttentionForward(const float*, const AttentionShape&,
                                           float*, float*, cudaStream_t);
template cudaError_t PlainAttentionForward(const bf16*, const AttentionShape&,
                                           bf16*, float*, cudaStream_t);
}  // namespace slidedp::ops
