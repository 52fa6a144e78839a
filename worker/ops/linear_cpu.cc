// Linear layers: GEMM over a fixed grid of tiles, weights upcast tile by tile.
#include <algorithm>
#include <cstring>

#include "common/base/status.h"
#include "common/base/units.h"
#include "worker/ops/blas.h"
#include "worker/ops/cpu_ops.h"
#include "worker/ops/simd.h"

namespace slidedp::ops {
namespace {

// At least this many tiles, if the shape gives them, keep 16 threads busy.
constexpr int64_t kWantedTiles = 12;
// Columns of a tile of C; with kTileFloats it bounds the rows of W in a tile.
constexpr int64_t kTileColumns = 192;
constexpr int64_t kBiasColumns = 64;

// Equal parts of at most `max`, a multiple of 16 (a SIMD register or two).
int64_t Part(int64_t total, int64_t max) {
  if (total <= max) return total;
  return AlignUp(CeilDiv(total, CeilDiv(total, max)), 16);
}

int64_t Parts(int64_t total, int64_t part) { return CeilDiv(total, part); }

absl::Status CheckLinear(int64_t tokens, int64_t in, int64_t out) {
  if (tokens < 0 || in <= 0 || out <= 0 || in > INT32_MAX || out > INT32_MAX) {
    return absl::InternalError(
        absl::StrCat("linear op of ", tokens, " x ", in, " x ", out));
  }
  return absl::OkStatus();
}

}  // namespace

void CpuOps::MatMulBf16(const float* a, const bf16* w, bool transpose,
                        const bf16* bias, int64_t m, int64_t n, int64_t k,
                        const float* residual, float* c) {
  if (m == 0) return;
  const int64_t tile_n = Part(n, kTileColumns);
  const int64_t tile_k = Part(k, kTileFloats / tile_n / 16 * 16);
  int64_t tile_m = Part(m, 512);
  while (tile_m > 128 && Parts(m, tile_m) * Parts(n, tile_n) < kWantedTiles) {
    tile_m = Part(tile_m, std::max<int64_t>(tile_m / 2, 128));
  }
  const int64_t rows = Parts(m, tile_m);
  const auto task = [&](int64_t i, float* tile) {
    const int64_t m0 = i % rows * tile_m, n0 = i / rows * tile_n;
    const int64_t tm = std::min(tile_m, m - m0), tn = std::min(tile_n, n - n0);
    float* out = c + m0 * n + n0;
    if (residual != nullptr && residual != c) {
      const float* from = residual + m0 * n + n0;
      for (int64_t row = 0; row < tm; ++row) {
        std::memcpy(out + row * n, from + row * n, tn * sizeof(float));
      }
    }
    for (int64_t k0 = 0; k0 < k; k0 += tile_k) {
      const int64_t tk = std::min(tile_k, k - k0);
      if (transpose) {
        for (int64_t row = 0; row < tn; ++row) {
          simd::Upcast(w + (n0 + row) * k + k0, tk, tile + row * tk);
        }
      } else {
        for (int64_t row = 0; row < tk; ++row) {
          simd::Upcast(w + (k0 + row) * n + n0, tn, tile + row * tn);
        }
      }
      Gemm(CblasNoTrans, transpose ? CblasTrans : CblasNoTrans, tm, tn, tk,
           1.0f, a + m0 * k + k0, k, tile, transpose ? tk : tn,
           residual != nullptr || k0 > 0, out, n);
    }
    if (bias != nullptr) {
      for (int64_t row = 0; row < tm; ++row) {
        simd::AddBf16(bias + n0, tn, out + row * n);
      }
    }
  };
  ForTasks(rows * Parts(n, tile_n), std::cref(task));
}

absl::Status CpuOps::LinearForward(ConstAct x, const bf16* w, const bf16* bias,
                                   int64_t tokens, int64_t in, int64_t out,
                                   ConstAct residual, Act y, Stream& stream) {
  SDP_RETURN_IF_ERROR(CheckLinear(tokens, in, out));
  return Enqueue(stream, [=, this] {
    MatMulBf16(static_cast<const float*>(x), w, /*transpose=*/true, bias,
               tokens, out, in, static_cast<const float*>(residual),
               static_cast<float*>(y));
  });
}

absl::Status CpuOps::LinearBackwardInput(ConstAct d_y, const bf16* w,
                                         int64_t tokens, int64_t in,
                                         int64_t out, bool add, Act d_x,
                                         Stream& stream) {
  SDP_RETURN_IF_ERROR(CheckLinear(tokens, in, out));
  return Enqueue(stream, [=, this] {
    MatMulBf16(static_cast<const float*>(d_y), w, /*transpose=*/false,
               /*bias=*/nullptr, tokens, in, out,
               add ? static_cast<const float*>(d_x) : nullptr,
               static_cast<float*>(d_x));
  });
}

absl::Status CpuOps::LinearBackwardWeight(ConstAct x, ConstAct d_y,
                                          int64_t tokens, int64_t in,
                                          int64_t out, bool add, float* d_w,
                                          float* d_bias, Stream& stream) {
  SDP_RETURN_IF_ERROR(CheckLinear(tokens, in, out));
  return Enqueue(stream, [=, this] {
    const float* a = static_cast<const float*>(d_y);
    const float* b = static_cast<const float*>(x);
    if (tokens == 0) {
      if (!add) ZeroRows(out, in, d_w, in);
      return;
    }
    int64_t tile_m = Part(out, 256), tile_n = Part(in, 768);
    const auto tiles = [&] { return Parts(out, tile_m) * Parts(in, tile_n); };
    if (tiles() < kWantedTiles) tile_m = Part(out, 128);
    if (tiles() < kWantedTiles) tile_n = Part(in, 384);
    const int64_t columns = Parts(in, tile_n);
    const auto task = [&](int64_t i, float*) {
      const int64_t m0 = i / columns * tile_m, n0 = i % columns * tile_n;
      Gemm(CblasTrans, CblasNoTrans, std::min(tile_m, out - m0),
           std::min(tile_n, in - n0), tokens, 1.0f, a + m0, out, b + n0, in,
           add, d_w + m0 * in + n0, in);
    };
    ForTasks(tiles(), std::cref(task));
    if (d_bias == nullptr) return;
    ForRanges(out, kBiasColumns, [&](int64_t begin, int64_t end) {
      double sums[kBiasColumns] = {};
      for (int64_t t = 0; t < tokens; ++t) {
        simd::AddToDouble(a + t * out + begin, end - begin, sums);
      }
      simd::AddDoubleToFloat(sums, end - begin, d_bias + begin);
    });
  });
}

}  // namespace slidedp::ops
