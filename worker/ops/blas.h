// One GEMM on the calling thread; row-major, strides in floats.
#pragma once

#include <cblas.h>

#include <cstdint>
#include <cstring>

namespace slidedp::ops {

// Rows of c become 0, whatever they held.
inline void ZeroRows(int64_t rows, int64_t columns, float* c, int64_t ldc) {
  for (int64_t row = 0; row < rows; ++row) {
    std::memset(c + row * ldc, 0, columns * sizeof(float));
  }
}

// c [m, n] (+)= alpha op(a) op(b), op(a) [m, k], op(b) [k, n].
inline void Gemm(CBLAS_TRANSPOSE transpose_a, CBLAS_TRANSPOSE transpose_b,
                 int64_t m, int64_t n, int64_t k, float alpha, const float* a,
                 int64_t lda, const float* b, int64_t ldb, bool add, float* c,
                 int64_t ldc) {
  // OpenBLAS's own pass for beta = 0 is several times slower than memset.
  if (!add) ZeroRows(m, n, c, ldc);
  cblas_sgemm(CblasRowMajor, transpose_a, transpose_b, m, n, k, alpha, a, lda,
              b, ldb, 1.0f, c, ldc);
}

}  // namespace slidedp::ops
