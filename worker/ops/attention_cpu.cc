// Causal attention in blocks: kQueryRows queries x kKeyColumns keys at a time,
// softmax over the blocks of a row by running maximum and sum, so that scores
// of a whole sequence never exist. Key blocks lie on a fixed grid.
#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "worker/ops/blas.h"
#include "worker/ops/cpu_ops.h"
#include "worker/ops/simd.h"

namespace slidedp::ops {
namespace {

constexpr int64_t kMaxQueryRows = 128;
constexpr int64_t kKeyColumns = 256;
static_assert(2 * kMaxQueryRows * kKeyColumns + 4 * kMaxQueryRows <=
              static_cast<int64_t>(kTileFloats));

// Short sequences waste less of the diagonal with small blocks; long ones
// multiply faster with large ones.
int64_t QueryRows(int64_t sequence) { return sequence > 512 ? 128 : 64; }

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

// One sequence of the fused buffer; strides in floats.
struct Geometry {
  explicit Geometry(const AttentionShape& s)
      : shape(s),
        rows(QueryRows(s.sequence)),
        blocks((s.sequence + rows - 1) / rows),
        key_blocks((s.sequence + kKeyColumns - 1) / kKeyColumns),
        scale(static_cast<float>(1.0 / std::sqrt(double(s.head_dim)))) {}

  Range queries(int64_t block) const {
    return {block * rows, std::min(shape.sequence, (block + 1) * rows)};
  }
  // Keys that row `query` of sequence b sees. Both ends ascend with `query`.
  Range seen(int64_t b, int64_t query) const {
    int64_t first = 0;
    if (shape.documents.first_row != nullptr) {
      const int64_t row = b * shape.sequence;
      first = shape.documents.first_row[row + query] - row;
    }
    if (shape.window > 0) first = std::max(first, query - shape.window + 1);
    return {first, query + 1};
  }
  // Keys of grid block `key_block` that any row of `q` sees; may be empty.
  Range keys(int64_t b, Range q, int64_t key_block) const {
    return {std::max(seen(b, q.begin).begin, key_block * kKeyColumns),
            std::min(q.end, (key_block + 1) * kKeyColumns)};
  }
  // Grid blocks that the rows of `q` see.
  Range key_block_range(int64_t b, Range q) const {
    return {seen(b, q.begin).begin / kKeyColumns,
            (q.end + kKeyColumns - 1) / kKeyColumns};
  }
  // Columns of the block `k` that `query` sees, from the block's first key.
  Range columns(int64_t b, int64_t query, Range k) const {
    const Range s = seen(b, query);
    const int64_t begin = std::clamp(s.begin, k.begin, k.end) - k.begin;
    const int64_t end = std::clamp(s.end, k.begin, k.end) - k.begin;
    return {begin, std::max(begin, end)};
  }

  int64_t q(int64_t b, int64_t row, int64_t head) const {
    return (b * shape.sequence + row) * shape.qkv_dim() + head * shape.head_dim;
  }
  int64_t k(int64_t b, int64_t row, int64_t kv_head) const {
    return q(b, row, shape.heads + kv_head);
  }
  int64_t v(int64_t b, int64_t row, int64_t kv_head) const {
    return q(b, row, shape.heads + shape.kv_heads + kv_head);
  }
  int64_t o(int64_t b, int64_t row, int64_t head) const {
    return ((b * shape.sequence + row) * shape.heads + head) * shape.head_dim;
  }
  int64_t stat(int64_t b, int64_t row, int64_t head) const {
    return (b * shape.heads + head) * shape.sequence + row;
  }
  int64_t qkv_stride() const { return shape.qkv_dim(); }
  int64_t o_stride() const { return shape.heads * shape.head_dim; }

  AttentionShape shape;
  int64_t rows, blocks, key_blocks;
  float scale;
};

absl::Status CheckAttentionShape(const AttentionShape& shape) {
  if (shape.kv_heads <= 0 || shape.heads % shape.kv_heads != 0 ||
      shape.head_dim <= 0 || shape.sequence <= 0 || shape.window < 0 ||
      shape.qkv_dim() > INT32_MAX) {
    return absl::InternalError(
        absl::StrCat("attention of ", shape.heads, " heads, ", shape.kv_heads,
                     " kv heads, ", "head_dim ", shape.head_dim, ", sequence ",
                     shape.sequence, ", window ", shape.window));
  }
  return absl::OkStatus();
}

// What a row's masked columns hold after the softmax.
void ZeroOutside(Range seen, int64_t columns, float* row) {
  ZeroRows(1, seen.begin, row, columns);
  ZeroRows(1, columns - seen.end, row + seen.end, columns);
}

// Rows `block` of one head.
void ForwardBlock(const Geometry& g, int64_t b, int64_t head, int64_t block,
                  const float* qkv, float* out, float* lse, float* tile) {
  const int64_t d = g.shape.head_dim;
  const int64_t kv_head = head / (g.shape.heads / g.shape.kv_heads);
  const Range q = g.queries(block), key_blocks = g.key_block_range(b, q);
  float* scores = tile;
  float max[kMaxQueryRows];
  double sum[kMaxQueryRows];
  std::fill(max, max + q.size(), -std::numeric_limits<float>::infinity());
  std::fill(sum, sum + q.size(), 0.0);
  for (int64_t j = key_blocks.begin; j < key_blocks.end; ++j) {
    const Range k = g.keys(b, q, j);
    Gemm(CblasNoTrans, CblasTrans, q.size(), k.size(), d, g.scale,
         qkv + g.q(b, q.begin, head), g.qkv_stride(),
         qkv + g.k(b, k.begin, kv_head), g.qkv_stride(), /*add=*/false, scores,
         k.size());
    for (int64_t i = 0; i < q.size(); ++i) {
      float* row = scores + i * k.size();
      const Range seen = g.columns(b, q.begin + i, k);
      ZeroOutside(seen, k.size(), row);
      if (seen.size() == 0) continue;
      const float block_max = simd::Max(row + seen.begin, seen.size());
      if (block_max > max[i]) {
        // exp(-infinity) = 0 in a row's first block.
        const float factor = std::exp(max[i] - block_max);
        if (sum[i] != 0) {
          simd::Scale(factor, d, out + g.o(b, q.begin + i, head));
        }
        sum[i] *= factor;
        max[i] = block_max;
      }
      sum[i] += simd::ExpSum(max[i], seen.size(), row + seen.begin);
    }
    Gemm(CblasNoTrans, CblasNoTrans, q.size(), d, k.size(), 1.0f, scores,
         k.size(), qkv + g.v(b, k.begin, kv_head), g.qkv_stride(),
         /*add=*/j > key_blocks.begin, out + g.o(b, q.begin, head),
         g.o_stride());
  }
  for (int64_t i = 0; i < q.size(); ++i) {
    simd::Scale(static_cast<float>(1.0 / sum[i]), d,
                out + g.o(b, q.begin + i, head));
    lse[g.stat(b, q.begin + i, head)] =
        static_cast<float>(max[i] + std::log(sum[i]));
  }
}

struct BackwardInputs {
  const float* qkv;
  const float* out;
  const float* lse;
  const float* d_out;
  float* d_qkv;
};

// The block (query rows `block`, keys of grid block `key_block`) of one head:
// adds its part of d_q and of d_k, d_v, as wanted.
void BackwardBlock(const Geometry& g, const BackwardInputs& in, int64_t b,
                   int64_t head, int64_t block, int64_t key_block, bool want_q,
                   bool want_kv, float* tile) {
  const int64_t d = g.shape.head_dim;
  const int64_t kv_head = head / (g.shape.heads / g.shape.kv_heads);
  const Range q = g.queries(block), k = g.keys(b, q, key_block);
  if (k.size() <= 0) return;
  float* scores = tile;
  float* d_p = tile + kMaxQueryRows * kKeyColumns;
  const float* q_rows = in.qkv + g.q(b, q.begin, head);
  const float* k_rows = in.qkv + g.k(b, k.begin, kv_head);
  const float* v_rows = in.qkv + g.v(b, k.begin, kv_head);
  const float* d_out_rows = in.d_out + g.o(b, q.begin, head);
  Gemm(CblasNoTrans, CblasTrans, q.size(), k.size(), d, g.scale, q_rows,
       g.qkv_stride(), k_rows, g.qkv_stride(), /*add=*/false, scores, k.size());
  Gemm(CblasNoTrans, CblasTrans, q.size(), k.size(), d, 1.0f, d_out_rows,
       g.o_stride(), v_rows, g.qkv_stride(), /*add=*/false, d_p, k.size());
  for (int64_t i = 0; i < q.size(); ++i) {
    const int64_t row = q.begin + i, o = g.o(b, row, head);
    const Range seen = g.columns(b, row, k);
    ZeroOutside(seen, k.size(), scores + i * k.size());
    ZeroOutside(seen, k.size(), d_p + i * k.size());
    const float delta =
        static_cast<float>(simd::Dot(in.out + o, in.d_out + o, d));
    simd::SoftmaxBackward(in.lse[g.stat(b, row, head)], delta, g.scale,
                          seen.size(), scores + i * k.size() + seen.begin,
                          d_p + i * k.size() + seen.begin);
  }
  if (want_q) {
    Gemm(CblasNoTrans, CblasNoTrans, q.size(), d, k.size(), 1.0f, d_p, k.size(),
         k_rows, g.qkv_stride(), /*add=*/true, in.d_qkv + g.q(b, q.begin, head),
         g.qkv_stride());
  }
  if (want_kv) {
    Gemm(CblasTrans, CblasNoTrans, k.size(), d, q.size(), 1.0f, d_p, k.size(),
         q_rows, g.qkv_stride(), /*add=*/true,
         in.d_qkv + g.k(b, k.begin, kv_head), g.qkv_stride());
    Gemm(CblasTrans, CblasNoTrans, k.size(), d, q.size(), 1.0f, scores,
         k.size(), d_out_rows, g.o_stride(), /*add=*/true,
         in.d_qkv + g.v(b, k.begin, kv_head), g.qkv_stride());
  }
}

}  // namespace

absl::Status CpuOps::AttentionForward(ConstAct qkv, const AttentionShape& shape,
                                      Act out, float* lse, Stream& stream) {
  SDP_RETURN_IF_ERROR(CheckAttentionShape(shape));
  return Enqueue(stream, [=, this] {
    const Geometry g(shape);
    const auto task = [&](int64_t i, float* tile) {
      const int64_t block = i % g.blocks, head = i / g.blocks % shape.heads;
      ForwardBlock(g, i / g.blocks / shape.heads, head, block,
                   static_cast<const float*>(qkv), static_cast<float*>(out),
                   lse, tile);
    };
    ForTasks(shape.batch * shape.heads * g.blocks, std::cref(task));
  });
}

// Blocks are visited in the same order for each element of d_qkv in both
// variants, with the same shapes, so they give the same bits: d_q by ascending
// keys; d_k and d_v by ascending head, then query.
absl::Status CpuOps::AttentionBackward(ConstAct qkv, ConstAct out,
                                       const float* lse, ConstAct d_out,
                                       const AttentionShape& shape, Act d_qkv,
                                       Stream& stream) {
  SDP_RETURN_IF_ERROR(CheckAttentionShape(shape));
  return Enqueue(stream, [=, this] {
    const Geometry g(shape);
    const BackwardInputs in{
        static_cast<const float*>(qkv), static_cast<const float*>(out), lse,
        static_cast<const float*>(d_out), static_cast<float*>(d_qkv)};
    ForRanges(shape.tokens(), 8, [&](int64_t begin, int64_t end) {
      ZeroRows(end - begin, shape.qkv_dim(), in.d_qkv + begin * shape.qkv_dim(),
               shape.qkv_dim());
    });
    const int64_t group = shape.heads / shape.kv_heads;
    const int64_t kv_heads = shape.batch * shape.kv_heads;
    if (kv_heads >= threads_) {
      // One task a kv head: each block's scores are computed once.
      const auto task = [&](int64_t i, float* tile) {
        const int64_t b = i / shape.kv_heads, kv_head = i % shape.kv_heads;
        for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
          for (int64_t block = 0; block < g.blocks; ++block) {
            for (int64_t j = 0; j < g.key_blocks; ++j) {
              BackwardBlock(g, in, b, h, block, j, true, true, tile);
            }
          }
        }
      };
      ForTasks(kv_heads, std::cref(task));
      return;
    }
    // Fewer kv heads than threads: d_q by query block, then d_k and d_v by key
    // block. 7 products instead of 5, on all threads.
    const auto query_task = [&](int64_t i, float* tile) {
      const int64_t block = i % g.blocks, head = i / g.blocks % shape.heads;
      for (int64_t j = 0; j < g.key_blocks; ++j) {
        BackwardBlock(g, in, i / g.blocks / shape.heads, head, block, j, true,
                      false, tile);
      }
    };
    ForTasks(shape.batch * shape.heads * g.blocks, std::cref(query_task));
    const auto key_task = [&](int64_t i, float* tile) {
      const int64_t j = i % g.key_blocks;
      const int64_t kv_head = i / g.key_blocks % shape.kv_heads;
      const int64_t b = i / g.key_blocks / shape.kv_heads;
      for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        for (int64_t block = 0; block < g.blocks; ++block) {
          BackwardBlock(g, in, b, h, block, j, false, true, tile);
        }
      }
    };
    ForTasks(kv_heads * g.key_blocks, std::cref(key_task));
  });
}

}  // namespace slidedp::ops
