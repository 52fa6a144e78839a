// Where packed documents lie, in the form in which cuDNN wants to know it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace slidedp::ops {

// Device memory. A document's rows begin at offsets in elements, of which there
// is one more than documents: the end.
struct RaggedRows {
  int32_t* lengths;  // of the documents; places without one: 0
  int32_t* qkv;      // q, k, v and their gradients
  int32_t* out;      // out and its gradient
  int32_t* stats;    // one a head
};

// What a row takes in each, in elements.
struct RowElements {
  int64_t qkv, out, stats;
};

constexpr size_t RaggedRowsBytes(int64_t documents) {
  return (4 * static_cast<size_t>(documents) + 3) * sizeof(int32_t);
}
// `memory` has RaggedRowsBytes.
RaggedRows RaggedRowsIn(void* memory, int64_t documents);

// `offsets`: of ops::Documents. No offset in elements exceeds int32.
cudaError_t LaunchRaggedRows(const int32_t* offsets, int64_t documents,
                             const RowElements& row, const RaggedRows& rows,
                             cudaStream_t stream);

}  // namespace slidedp::ops
