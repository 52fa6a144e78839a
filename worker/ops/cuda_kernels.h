// Launchers of the kernels behind Ops, except for linear and attention. T is
// the activations' type, bf16 or float; operands and results as in ops.h.
// Every launcher gives the same bits for the same operands: no floating-point
// atomics, sums are cut by shape. Counts of tokens, rows and columns are above
// 0. An id or label outside the vocabulary is a fault, which loses the context:
// they are checked where they are read.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "common/base/bf16.h"
#include "worker/ops/used_rows.h"

namespace slidedp::ops {

// firsts: [vocab].
template <typename T>
cudaError_t LaunchEmbeddingForward(const int32_t* ids, const bf16* table,
                                   int64_t tokens, int64_t hidden,
                                   int64_t vocab, int32_t* firsts, T* out,
                                   cudaStream_t stream);
size_t EmbeddingBackwardScratchBytes(int64_t tokens);
template <typename T>
cudaError_t LaunchEmbeddingBackward(const int32_t* ids, const T* d_out,
                                    int64_t tokens, int64_t hidden,
                                    int64_t vocab, void* scratch,
                                    float* d_table, cudaStream_t stream);

// Sums over rows are cut into so many parts, each summed by one block.
int64_t GradientParts(int64_t rows);
// d[c] += sum over parts of partial[part * stride + c], in a fixed order.
cudaError_t LaunchAddPartials(const float* partial, int64_t parts,
                              int64_t stride, int64_t columns, float* d,
                              cudaStream_t stream);

// A row of float32 sums must fit the shared memory of any GPU.
inline constexpr int64_t kMaxNormHidden = 24 << 10;
template <typename T>
cudaError_t LaunchRmsNormForward(const T* x, const bf16* w, int64_t tokens,
                                 int64_t hidden, float eps, T* out, float* rstd,
                                 cudaStream_t stream);
// partial: GradientParts(tokens) * hidden floats. normed may be null.
template <typename T>
cudaError_t LaunchRmsNormBackward(const T* x, const bf16* w, const float* rstd,
                                  const T* d_out, int64_t tokens,
                                  int64_t hidden, bool add, float* partial,
                                  T* d_x, float* d_w, T* normed,
                                  cudaStream_t stream);

inline constexpr int64_t kMaxRopeHeadDim = 512;
struct RopeShape {
  int64_t tokens, sequence, heads, kv_heads, head_dim;
  const int32_t* first_row;  // as in Documents; may be null
};
template <typename T>
cudaError_t LaunchQkNormRopeForward(const T* qkv, const bf16* q_norm,
                                    const bf16* k_norm, float eps,
                                    const float* inverse_frequencies,
                                    const RopeShape& shape, T* out, float* rstd,
                                    cudaStream_t stream);
// partial: GradientParts(tokens) * 2 * head_dim floats; unused without norms.
template <typename T>
cudaError_t LaunchQkNormRopeBackward(const T* qkv, const bf16* q_norm,
                                     const bf16* k_norm,
                                     const float* inverse_frequencies,
                                     const RopeShape& shape, const float* rstd,
                                     float* partial, T* d_qkv, float* d_q_norm,
                                     float* d_k_norm, cudaStream_t stream);

template <typename T>
cudaError_t LaunchSwiGluForward(const T* gate_up, int64_t tokens, int64_t inner,
                                T* out, cudaStream_t stream);
template <typename T>
cudaError_t LaunchSwiGluBackward(const T* gate_up, const T* d_out,
                                 int64_t tokens, int64_t inner, T* d_gate_up,
                                 T* activated, cudaStream_t stream);

// losses: rows doubles of scratch.
template <typename T>
cudaError_t LaunchCrossEntropy(T* logits, const int32_t* labels, int64_t rows,
                               int64_t vocab, float scale, double* losses,
                               double* loss_sum, cudaStream_t stream);

cudaError_t LaunchCastToBf16(const float* x, int64_t count, bf16* out,
                             cudaStream_t stream);
// count is above 0.
cudaError_t LaunchCopyUsedRows(const UsedRows& used, int64_t width,
                               int64_t begin, int64_t count, const bf16* values,
                               bf16* out, cudaStream_t stream);
// partial: kSquaredNormParts doubles. count may be 0.
inline constexpr int kSquaredNormParts = 528;
cudaError_t LaunchSquaredNorm(const bf16* x, int64_t count, double* partial,
                              double* out, cudaStream_t stream);

}  // namespace slidedp::ops
