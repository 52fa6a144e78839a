#include "worker/ops/cuda_elements.cuh"
#include "worker/ops/cuda_kernels.h"

namespace slidedp::ops {
namespace {

constexpr int kColumns = 32;
constexpr int kLanes = 32;  // share a column

__global__ void __launch_bounds__(kColumns* kLanes)
    AddPartials(const float* partial, int64_t parts, int64_t stride,
                int64_t columns, float* d) {
  __shared__ float sums[kLanes][kColumns];
  const int64_t column =
      static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  float sum = 0;
  if (column < columns) {
    for (int64_t part = threadIdx.y; part < parts; part += kLanes) {
      sum += partial[part * stride + column];
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  for (int lane = 1; lane < kLanes; ++lane) sum += sums[lane][threadIdx.x];
  d[column] += sum;
}

}  // namespace

// Four blocks for each multiprocessor of an H100. Not asked of the GPU at hand:
// the bits would depend on it.
int64_t GradientParts(int64_t rows) { return std::min<int64_t>(rows, 528); }

cudaError_t LaunchAddPartials(const float* partial, int64_t parts,
                              int64_t stride, int64_t columns, float* d,
                              cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(cuda::CeilDiv(columns, kColumns));
  AddPartials<<<blocks, dim3(kColumns, kLanes), 0, stream>>>(
      partial, parts, stride, columns, d);
  return cudaGetLastError();
}

}  // namespace slidedp::ops
