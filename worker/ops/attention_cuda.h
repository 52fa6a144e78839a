// Attention on the GPU: the two methods of Ops, with their contracts.
//
// BF16: cuDNN's fused attention, read in place from the fused buffer. Where it
// refuses a shape, and for float32 activations, the plain kernels; a refusal is
// logged once per shape. Packed documents are its ragged form, both directions
// or neither, because its statistics lie in an order of their own; with
// `deterministic` they run on the plain kernels. The fast backward is not
// bitwise repeatable; the deterministic one is, and its workspace is bounded by
// going over sequences, then over groups of heads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "common/device/device.h"
#include "worker/ops/cuda_plan_mode.h"
#include "worker/ops/cuda_sdpa.h"
#include "worker/ops/cuda_workspace.h"
#include "worker/ops/ops.h"

namespace slidedp::ops {

struct CudaAttentionOptions {
  ActDType activation = ActDType::kBf16;
  bool deterministic = false;
  // What a deterministic backward may take. One group of heads of one sequence
  // that needs more goes to the plain kernels.
  size_t deterministic_workspace_bytes = size_t{4} << 30;
};

// Thread-compatible.
class CudaAttention {
 public:
  static absl::StatusOr<std::unique_ptr<CudaAttention>> Create(
      device::Device& device, CudaWorkspace& workspace,
      const CudaAttentionOptions& options);

  void set_mode(PlanMode mode) { mode_ = mode; }

  absl::Status Forward(ConstAct qkv, const AttentionShape& shape, Act out,
                       float* lse, Stream& stream);
  absl::Status Backward(ConstAct qkv, ConstAct out, const float* lse,
                        ConstAct d_out, const AttentionShape& shape, Act d_qkv,
                        Stream& stream);
  // Whether the shape runs on cuDNN; known once it was planned.
  absl::StatusOr<bool> IsFused(const AttentionShape& shape, bool backward);

 private:
  // How a shape runs in one direction.
  struct Route {
    std::unique_ptr<SdpaPlan> plan;  // null: plain kernels
    // The plan covers so many sequences and kv heads; the rest are further
    // calls of it.
    int64_t batch = 0, kv_heads = 0;
  };
  struct Key {
    int64_t batch, sequence, heads, kv_heads, head_dim, window;
    int64_t documents;  // places; 0: not packed
    bool backward;
    bool operator==(const Key&) const = default;
    template <typename H>
    friend H AbslHashValue(H h, const Key& k) {
      return H::combine(std::move(h), k.batch, k.sequence, k.heads, k.kv_heads,
                        k.head_dim, k.window, k.documents, k.backward);
    }
  };

  CudaAttention(CudaWorkspace& workspace, const CudaAttentionOptions& options)
      : workspace_(workspace), options_(options) {}

  static Key KeyOf(const AttentionShape& shape, bool backward);
  absl::StatusOr<const Route*> RouteOf(const AttentionShape& shape,
                                       bool backward);
  // Plans the shape, with packed documents in both directions.
  absl::Status Plan(const AttentionShape& shape, bool backward);
  // How cuDNN runs it; Unimplemented if it does not.
  absl::StatusOr<Route> PlanFused(const AttentionShape& shape, bool backward);
  absl::StatusOr<Route> PlanDeterministic(const SdpaShape& whole);
  absl::Status RunFused(const Route& route, const AttentionShape& shape,
                        const SdpaPointers& first, Stream& stream);
  absl::Status RunPacked(const Route& route, const AttentionShape& shape,
                         SdpaPointers pointers, Stream& stream);

  CudaWorkspace& workspace_;
  const CudaAttentionOptions options_;
  std::unique_ptr<Sdpa> sdpa_;  // null with float32 activations
  PlanMode mode_ = PlanMode::kFirstChoice;
  absl::flat_hash_map<Key, Route> routes_;
};

}  // namespace slidedp::ops
