#include <algorithm>

#include "worker/ops/cuda_linear_kernels.h"

namespace slidedp::ops {
namespace {

constexpr int kUpcastThreads = 256;

// A block sums kRows rows of kColumns columns; kLanes threads share a column.
constexpr int kColumns = 32;
constexpr int kLanes = 8;
constexpr int64_t kRows = 256;

__device__ float Value(float x) { return x; }
__device__ float Value(bf16 x) {
  return __uint_as_float(static_cast<unsigned>(x) << 16);
}

__global__ void Upcast(const bf16* in, int64_t count, float* out) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < count; i += step) {
    out[i] = Value(in[i]);
  }
}

// partial [row blocks, out]
template <typename T>
__global__ void SumRows(const T* d_y, int64_t tokens, int64_t out,
                        float* partial) {
  __shared__ float sums[kLanes][kColumns];
  const int64_t column =
      static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kRows;
  const int64_t last = min(first + kRows, tokens);
  float sum = 0;
  if (column < out) {
    for (int64_t t = first + threadIdx.y; t < last; t += kLanes) {
      sum += Value(d_y[t * out + column]);
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= out) return;
  for (int lane = 1; lane < kLanes; ++lane) sum += sums[lane][threadIdx.x];
  partial[blockIdx.y * out + column] = sum;
}

__global__ void AddPartials(const float* partial, int64_t blocks, int64_t out,
                            float* d_bias) {
  const int64_t column =
      static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (column >= out) return;
  float sum = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    sum += partial[block * out + column];
  }
  d_bias[column] += sum;
}

int64_t RowBlocks(int64_t tokens) { return (tokens + kRows - 1) / kRows; }

template <typename T>
cudaError_t BiasGradient(const T* d_y, int64_t tokens, int64_t out,
                         float* partial, float* d_bias, cudaStream_t stream) {
  const int64_t blocks = RowBlocks(tokens);
  const dim3 grid(static_cast<unsigned>((out + kColumns - 1) / kColumns),
                  static_cast<unsigned>(blocks));
  SumRows<<<grid, dim3(kColumns, kLanes), 0, stream>>>(d_y, tokens, out,
                                                       partial);
  const auto column_blocks = static_cast<unsigned>((out + 255) / 256);
  AddPartials<<<column_blocks, 256, 0, stream>>>(partial, blocks, out, d_bias);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchUpcast(const bf16* in, int64_t count, float* out,
                         cudaStream_t stream) {
  const int64_t blocks = (count + kUpcastThreads - 1) / kUpcastThreads;
  Upcast<<<static_cast<unsigned>(std::min<int64_t>(blocks, 65535)),
           kUpcastThreads, 0, stream>>>(in, count, out);
  return cudaGetLastError();
}

int64_t BiasGradientPartials(int64_t tokens, int64_t out) {
  return RowBlocks(tokens) * out;
}

cudaError_t LaunchBiasGradient(const bf16* d_y, int64_t tokens, int64_t out,
                               float* partial, float* d_bias,
                               cudaStream_t stream) {
  return BiasGradient(d_y, tokens, out, partial, d_bias, stream);
}

cudaError_t LaunchBiasGradient(const float* d_y, int64_t tokens, int64_t out,
                               float* partial, float* d_bias,
                               cudaStream_t stream) {
  return BiasGradient(d_y, tokens, out, partial, d_bias, stream);
}

}  // namespace slidedp::ops
