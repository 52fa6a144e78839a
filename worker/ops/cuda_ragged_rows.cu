#include "worker/ops/cuda_ragged_rows.h"

namespace slidedp::ops {
namespace {

constexpr int kThreads = 256;

__global__ void FillRaggedRows(const int32_t* offsets, int32_t documents,
                               RowElements row, RaggedRows rows) {
  const int32_t i = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i > documents) return;
  const int32_t offset = offsets[i];
  rows.qkv[i] = static_cast<int32_t>(offset * row.qkv);
  rows.out[i] = static_cast<int32_t>(offset * row.out);
  rows.stats[i] = static_cast<int32_t>(offset * row.stats);
  if (i < documents) rows.lengths[i] = offsets[i + 1] - offset;
}

}  // namespace

RaggedRows RaggedRowsIn(void* memory, int64_t documents) {
  RaggedRows rows;
  rows.lengths = static_cast<int32_t*>(memory);
  rows.qkv = rows.lengths + documents;
  rows.out = rows.qkv + documents + 1;
  rows.stats = rows.out + documents + 1;
  return rows;
}

cudaError_t LaunchRaggedRows(const int32_t* offsets, int64_t documents,
                             const RowElements& row, const RaggedRows& rows,
                             cudaStream_t stream) {
  const auto blocks =
      static_cast<unsigned>((documents + 1 + kThreads - 1) / kThreads);
  FillRaggedRows<<<blocks, kThreads, 0, stream>>>(
      offsets, static_cast<int32_t>(documents), row, rows);
  return cudaGetLastError();
}

}  // namespace slidedp::ops
