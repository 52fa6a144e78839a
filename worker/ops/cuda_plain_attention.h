// Causal attention without cuDNN: float32 arithmetic on the plain cores, scores
// recomputed block by block. Far slower; for what cuDNN refuses, for float32
// activations, and as the check of the fast path. Deterministic.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "common/base/bf16.h"
#include "worker/ops/ops.h"

namespace slidedp::ops {

inline constexpr int64_t kPlainAttentionMaxHeadDim = 512;

// Pointers as in Ops; T is bf16 or float. `delta` [tokens * heads] is scratch.
template <typename T>
cudaError_t PlainAttentionForward(const T* qkv, const AttentionShape& shape,
                                  T* out, float* lse, cudaStream_t stream);
template <typename T>
cudaError_t PlainAttentionBackward(const T* qkv, const T* out, const float* lse,
                                   const T* d_out, const AttentionShape& shape,
                                   float* delta, T* d_qkv, cudaStream_t stream);

extern template cudaError_t PlainAttentionForward(const float*,
                                                  const AttentionShape&, float*,
                                                  float*, cudaStream_t);
extern template cudaError_t PlainAttentionForward(const bf16*,
                                                  const AttentionShape&, bf16*,
                                                  float*, cudaStream_t);
extern template cudaError_t PlainAttentionBackward(const float*, const float*,
                                                   const float*, const float*,
                                                   const AttentionShape&,
                                                   float*, float*,
                                                   cudaStream_t);
extern template cudaError_t PlainAttentionBackward(const bf16*, const bf16*,
                                                   const float*, const bf16*,
                                                   const AttentionShape&,
                                                   float*, bf16*, cudaStream_t);

}  // namespace slidedp::ops
