// Per-head RMS norm of q and k, then rotation. Angles are recomputed for each
// row and used by all heads of it: no table, under 1 % of a layer's time.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "worker/ops/cpu_ops.h"
#include "worker/ops/simd.h"

namespace slidedp::ops {
namespace {

constexpr int64_t kRopeRows = 8;
// Token ranges that sum their norm gradients apart; in the shared scratch.
constexpr int64_t kGradientParts = 32;
constexpr int64_t kMaxHeadDim =
    kSharedBytes / sizeof(double) / (2 * kGradientParts);
static_assert(kMaxHeadDim <= static_cast<int64_t>(kTileFloats));

absl::Status CheckRopeShape(const AttentionShape& shape) {
  if (shape.kv_heads <= 0 || shape.heads % shape.kv_heads != 0 ||
      shape.head_dim <= 0 || shape.head_dim % 2 != 0 ||
      shape.head_dim > kMaxHeadDim || shape.sequence <= 0) {
    return absl::InternalError(absl::StrCat(
        "rope of ", shape.heads, " heads, ", shape.kv_heads, " kv heads, ",
        "head_dim ", shape.head_dim, ", sequence ", shape.sequence));
  }
  return absl::OkStatus();
}

// Of row t in its document.
int64_t Position(const AttentionShape& shape, int64_t t) {
  const int32_t* first_row = shape.documents.first_row;
  return first_row == nullptr ? t % shape.sequence : t - first_row[t];
}

// cos and sin of one position, `half` values each.
void Angles(int64_t position, const float* inverse_frequencies, int64_t half,
            float sign, float* cos, float* sin) {
  for (int64_t i = 0; i < half; ++i) {
    const float angle = static_cast<float>(position) * inverse_frequencies[i];
    cos[i] = std::cos(angle);
    sin[i] = sign * std::sin(angle);
  }
}

}  // namespace

absl::Status CpuOps::QkNormRopeForward(ConstAct qkv, const bf16* q_norm,
                                       const bf16* k_norm, double eps,
                                       const float* inverse_frequencies,
                                       const AttentionShape& shape, Act out,
                                       float* rstd, Stream& stream) {
  SDP_RETURN_IF_ERROR(CheckRopeShape(shape));
  return Enqueue(stream, [=, this] {
    const int64_t d = shape.head_dim, half = d / 2;
    const int64_t rotated = shape.heads + shape.kv_heads;
    const auto row_forward = [&](int64_t t, float* tile) {
      float* cos = tile;
      float* sin = tile + half;
      Angles(Position(shape, t), inverse_frequencies, half, 1, cos, sin);
      const float* in = static_cast<const float*>(qkv) + t * shape.qkv_dim();
      float* to = static_cast<float*>(out) + t * shape.qkv_dim();
      for (int64_t h = 0; h < rotated; ++h, in += d, to += d) {
        const bf16* w = h < shape.heads ? q_norm : k_norm;
        const float* from = in;
        if (w != nullptr) {
          float& r = rstd[t * rotated + h];
          r = static_cast<float>(1.0 /
                                 std::sqrt(simd::Dot(in, in, d) / d + eps));
          simd::NormScale(in, w, r, d, to);
          from = to;
        }
        simd::Rotate(from, from + half, cos, sin, half, to, to + half);
      }
      std::memmove(to, in, shape.kv_heads * d * sizeof(float));
    };
    const auto task = [&](int64_t i, float* tile) {
      const int64_t end = std::min(shape.tokens(), (i + 1) * kRopeRows);
      for (int64_t t = i * kRopeRows; t < end; ++t) row_forward(t, tile);
    };
    ForTasks((shape.tokens() + kRopeRows - 1) / kRopeRows, std::cref(task));
  });
}

absl::Status CpuOps::QkNormRopeBackward(ConstAct qkv, const bf16* q_norm,
                                        const bf16* k_norm,
                                        const float* inverse_frequencies,
                                        const AttentionShape& shape,
                                        const float* rstd, Act d_qkv,
                                        float* d_q_norm, float* d_k_norm,
                                        Stream& stream) {
  SDP_RETURN_IF_ERROR(CheckRopeShape(shape));
  return Enqueue(stream, [=, this] {
    const int64_t d = shape.head_dim, half = d / 2;
    const int64_t rotated = shape.heads + shape.kv_heads;
    double* sums = static_cast<double*>(shared_);  // [part][q, k][d]
    const auto row_backward = [&](int64_t t, float* tile, double* q_sum,
                                  double* k_sum) {
      float* cos = tile;
      float* sin = tile + half;
      Angles(Position(shape, t), inverse_frequencies, half, -1, cos, sin);
      const float* x = static_cast<const float*>(qkv) + t * shape.qkv_dim();
      float* g = static_cast<float*>(d_qkv) + t * shape.qkv_dim();
      for (int64_t h = 0; h < rotated; ++h, x += d, g += d) {
        simd::Rotate(g, g + half, cos, sin, half, g, g + half);
        const bf16* w = h < shape.heads ? q_norm : k_norm;
        if (w == nullptr) continue;
        const float r = rstd[t * rotated + h];
        simd::NormWeightGradient(x, g, r, d, h < shape.heads ? q_sum : k_sum);
        const double dot = simd::DotWeighted(g, x, w, d);
        const double r3 = static_cast<double>(r) * r * r;
        simd::NormBackward(x, w, g, r, static_cast<float>(r3 * dot / d),
                           /*add=*/false, d, g);
      }
    };
    const int64_t rows = (shape.tokens() + kGradientParts - 1) / kGradientParts;
    const auto task = [&](int64_t part, float* tile) {
      double* q_sum = sums + part * 2 * d;
      std::fill(q_sum, q_sum + 2 * d, 0.0);
      const int64_t end = std::min(shape.tokens(), (part + 1) * rows);
      for (int64_t t = part * rows; t < end; ++t) {
        row_backward(t, tile, q_sum, q_sum + d);
      }
    };
    ForTasks(kGradientParts, std::cref(task));
    const auto add = [&](const bf16* w, int64_t column, float* d_w) {
      if (w == nullptr) return;
      for (int64_t part = 1; part < kGradientParts; ++part) {
        for (int64_t i = 0; i < d; ++i) {
          sums[column + i] += sums[part * 2 * d + column + i];
        }
      }
      simd::AddDoubleToFloat(sums + column, d, d_w);
    };
    add(q_norm, 0, d_q_norm);
    add(k_norm, d, d_k_norm);
  });
}

}  // namespace slidedp::ops
