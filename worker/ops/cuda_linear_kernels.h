// Kernels beside the matrix products of linear layers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/base/bf16.h"

namespace slidedp::ops {

// out = float(in), exact.
cudaError_t LaunchUpcast(const bf16* in, int64_t count, float* out,
                         cudaStream_t stream);

// Floats that a bias gradient of this size needs in `partial`.
int64_t BiasGradientPartials(int64_t tokens, int64_t out);
// d_bias[c] += sum over t of d_y[t, c]; always in the same order. d_y is BF16
// or float32.
cudaError_t LaunchBiasGradient(const bf16* d_y, int64_t tokens, int64_t out,
                               float* partial, float* d_bias,
                               cudaStream_t stream);
cudaError_t LaunchBiasGradient(const float* d_y, int64_t tokens, int64_t out,
                               float* partial, float* d_bias,
                               cudaStream_t stream);

}  // namespace slidedp::ops
