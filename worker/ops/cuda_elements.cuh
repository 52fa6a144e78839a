// Elements of activations and weights on the GPU: float32 or BF16 in memory,
// float32 in registers; vectors of them; sums over a block whose order is
// fixed by its size.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "common/base/bf16.h"

namespace slidedp::ops::cuda {

inline __device__ float ToFloat(float x) { return x; }
inline __device__ float ToFloat(bf16 x) {
  return __uint_as_float(static_cast<unsigned>(x) << 16);
}

// Nearest, ties to even; NaN stays NaN.
template <typename T>
inline __device__ T Round(float x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return x;
  } else {
    bf16 rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(x));
    return rounded;
  }
}
// x as an activation holds it.
template <typename T>
inline __device__ float Rounded(float x) {
  return ToFloat(Round<T>(x));
}

// exp(x). With BF16 activations the fast one: its error, 2^-21 for |x| < 16,
// is far below theirs.
template <typename T>
inline __device__ float Exp(float x) {
  return sizeof(T) == sizeof(float) ? expf(x) : __expf(x);
}

// How many activations 16 bytes hold.
template <typename T>
inline constexpr int kVector = 16 / static_cast<int>(sizeof(T));

template <typename T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T v[N];
};

template <int N, typename T>
inline __device__ void Unpack(const Pack<T, N>& pack, float (&to)[N]) {
#pragma unroll
  for (int j = 0; j < N; ++j) to[j] = ToFloat(pack.v[j]);
}
// N elements at an address aligned like Pack<T, N>.
template <int N, typename T>
inline __device__ void Load(const T* from, float (&to)[N]) {
  const Pack<T, N> pack = *reinterpret_cast<const Pack<T, N>*>(from);
  Unpack(pack, to);
}
template <int N, typename T>
inline __device__ void Store(const float (&from)[N], T* to) {
  Pack<T, N> pack;
#pragma unroll
  for (int j = 0; j < N; ++j) pack.v[j] = Round<T>(from[j]);
  *reinterpret_cast<Pack<T, N>*>(to) = pack;
}

// The sum over all threads, for all of them. Blocks are whole warps.
template <typename V>
inline __device__ V BlockSum(V x) {
  __shared__ V sums[32];
  for (int step = 16; step > 0; step /= 2) {
    x += __shfl_xor_sync(0xffffffffu, x, step);
  }
  __syncthreads();  // the previous sum has been read
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  V total = 0;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) total += sums[warp];
  return total;
}

// Whether rows of `columns` elements at these addresses can be accessed in
// vectors of N. Null is aligned.
inline bool IsVector(int n, int64_t columns,
                     std::initializer_list<const void*> addresses) {
  if (columns % n != 0) return false;
  return std::all_of(addresses.begin(), addresses.end(), [](const void* p) {
    return reinterpret_cast<uintptr_t>(p) % 16 == 0;
  });
}

inline int64_t CeilDiv(int64_t n, int64_t by) { return (n + by - 1) / by; }

// Blocks of `threads` along a row's vectors, and rows; kernels stride over the
// rows that are more than the grid's.
inline dim3 RowGrid(int64_t rows, int64_t vectors, int threads) {
  return dim3(static_cast<unsigned>(CeilDiv(vectors, threads)),
              static_cast<unsigned>(std::min<int64_t>(rows, 65535)));
}

}  // namespace slidedp::ops::cuda
