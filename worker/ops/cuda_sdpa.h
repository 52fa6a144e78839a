// cuDNN's fused attention, planned for one shape. The only code that sees the
// cuDNN frontend, which takes minutes to compile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "common/device/device.h"
#include "worker/ops/cuda_ragged_rows.h"

namespace slidedp::ops {

// Causal attention over rows of the fused buffer. Sequences and heads may be a
// part of it: strides are those of the whole.
struct SdpaShape {
  int64_t batch, sequence;
  int64_t heads, kv_heads, head_dim;
  int64_t window;      // keys a query sees, itself included; 0: all before it
  int64_t qkv_stride;  // elements from one token to the next, q, k, v and
                       // their gradients
  int64_t out_stride;  // likewise out and its gradient
  // Above 0: packed. The batch * sequence rows are at most so many documents,
  // each of at most `sequence` rows.
  int64_t documents = 0;
};

// Device addresses of the first element. `stats` is [batch, heads, sequence],
// or of packed documents [rows, heads]. Gradients are null in forward; `rows`
// is of packed documents only.
struct SdpaPointers {
  const void *q, *k, *v;
  void* out;
  float* stats;
  const void* d_out;
  void *d_q, *d_k, *d_v;
  RaggedRows rows = {};
};

class SdpaPlan {
 public:
  virtual ~SdpaPlan() = default;
  virtual size_t workspace_bytes() const = 0;
  virtual absl::Status Run(const SdpaPointers& pointers, void* workspace,
                           device::Stream& stream) = 0;
};

// Thread-compatible. Plans are used while it lives.
class Sdpa {
 public:
  static absl::StatusOr<std::unique_ptr<Sdpa>> Create(device::Device& device);
  virtual ~Sdpa() = default;

  // Unimplemented, with cuDNN's reason, where it does not take the shape.
  virtual absl::StatusOr<std::unique_ptr<SdpaPlan>> PlanForward(
      const SdpaShape& shape) = 0;
  // deterministic: bitwise repeatable; its workspace grows with batch x heads x
  // sequence^2.
  virtual absl::StatusOr<std::unique_ptr<SdpaPlan>> PlanBackward(
      const SdpaShape& shape, bool deterministic) = 0;
};

// Workspace of a deterministic backward, without planning it: what cuDNN takes
// for the scores' gradient, which is most of it.
size_t DeterministicWorkspaceBytes(const SdpaShape& shape);

}  // namespace slidedp::ops
