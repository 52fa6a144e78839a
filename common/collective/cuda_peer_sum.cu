#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "common/collective/cuda_peer_sum.h"
#include "common/device/cuda_status.h"

namespace slidedp::collective {
namespace {

constexpr int kThreads = 256;
// Enough to saturate the memory of any GPU of today with kThreads threads each.
constexpr size_t kMaxBlocks = 2048;
constexpr int kVectorBytes = 16;

__device__ float ToFloat(float value) { return value; }
__device__ float ToFloat(__nv_bfloat16 value) {
  return __bfloat162float(value);
}
template <typename T>
__device__ T Round(float value);
template <>
__device__ float Round<float>(float value) {
  return value;
}
template <>
__device__ __nv_bfloat16 Round<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// N elements of T, loaded and stored at once.
template <typename T, int N>
struct alignas(sizeof(T) * N) Group {
  T values[N];
};

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    Sum(T* own, size_t groups, StagedPieces staged) {
  using V = Group<T, N>;
  const size_t step = static_cast<size_t>(gridDim.x) * kThreads;
  for (size_t i = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x;
       i < groups; i += step) {
    const V mine = reinterpret_cast<const V*>(own)[i];
    const char* other = static_cast<const char*>(staged.first) + i * sizeof(V);
    float sum[N];
    for (int rank = 0; rank < staged.ranks; ++rank) {
      V value = mine;
      if (rank != staged.rank) {
        value = *reinterpret_cast<const V*>(other);
        other += staged.stride_bytes;
      }
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float term = ToFloat(value.values[j]);
        sum[j] = rank == 0 ? term : sum[j] + term;
      }
    }
    V result;
#pragma unroll
    for (int j = 0; j < N; ++j) result.values[j] = Round<T>(sum[j]);
    reinterpret_cast<V*>(own)[i] = result;
  }
}

template <typename T, int N>
absl::Status Launch(T* own, size_t groups, const StagedPieces& staged,
                    cudaStream_t stream) {
  if (groups == 0) return absl::OkStatus();
  const size_t blocks =
      std::min((groups + kThreads - 1) / kThreads, kMaxBlocks);
  Sum<T, N><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(own, groups,
                                                                    staged);
  return device::CudaStatus(cudaGetLastError(), "sum over peers");
}

template <typename T>
absl::Status SumOf(void* data, size_t count, const StagedPieces& staged,
                   cudaStream_t stream) {
  T* own = static_cast<T*>(data);
  constexpr int kWidth = kVectorBytes / sizeof(T);
  if (reinterpret_cast<uintptr_t>(data) % kVectorBytes != 0) {
    return Launch<T, 1>(own, count, staged, stream);
  }
  const size_t whole = count / kWidth * kWidth;
  absl::Status status = Launch<T, kWidth>(own, count / kWidth, staged, stream);
  if (!status.ok() || whole == count) return status;
  StagedPieces rest = staged;
  rest.first = static_cast<const T*>(staged.first) + whole;
  return Launch<T, 1>(own + whole, count - whole, rest, stream);
}

}  // namespace

absl::Status LaunchPeerSum(void* own, size_t count, DType dtype,
                           const StagedPieces& staged, cudaStream_t stream) {
  return dtype == DType::kF32
             ? SumOf<float>(own, count, staged, stream)
             : SumOf<__nv_bfloat16>(own, count, staged, stream);
}

absl::Status PreparePeerSum() {
  cudaFuncAttributes attributes;
  for (const void* kernel :
       {reinterpret_cast<const void*>(&Sum<float, 1>),
        reinterpret_cast<const void*>(&Sum<float, 4>),
        reinterpret_cast<const void*>(&Sum<__nv_bfloat16, 1>),
        reinterpret_cast<const void*>(&Sum<__nv_bfloat16, 8>)}) {
    const absl::Status status = device::CudaStatus(
        cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace slidedp::collective
