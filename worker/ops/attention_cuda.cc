#include "worker/ops/attention_cuda.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/base/log.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/device/cuda_status.h"
#include "common/device/cuda_stream.h"
#include "worker/ops/cuda_plain_attention.h"

namespace slidedp::ops {
namespace {

// What cuDNN's kernels ask of every address.
constexpr uintptr_t kAlignment = 16;
constexpr size_t kWorkspaceAlignment = 256;
// Heads of 256 came back with NaNs (cuDNN 9.19, H200: documents of 1 to 130
// rows); 64 and 128 are right.
constexpr int64_t kPackedMaxHeadDim = 128;

bool IsPacked(const AttentionShape& s) {
  return s.documents.first_row != nullptr;
}

std::string NameOf(const AttentionShape& s) {
  return absl::StrCat("attention of ", s.batch, " x ", s.sequence, " tokens, ",
                      s.heads, "/", s.kv_heads, " heads of ", s.head_dim,
                      s.window == 0 ? "" : absl::StrCat(", window ", s.window),
                      IsPacked(s) ? ", packed documents" : "");
}

absl::Status CheckShape(const AttentionShape& s) {
  const bool valid = s.batch > 0 && s.sequence > 0 && s.kv_heads > 0 &&
                     s.heads > 0 && s.heads % s.kv_heads == 0 &&
                     s.head_dim > 0 && s.window >= 0 &&
                     s.qkv_dim() <= INT32_MAX && s.sequence <= INT32_MAX &&
                     IsPacked(s) == (s.documents.offsets != nullptr) &&
                     IsPacked(s) == (s.documents.max_documents > 0);
  if (!valid) return absl::InternalError(NameOf(s));
  if (s.heads > 65535 || s.batch > 65535) {
    return absl::UnimplementedError(
        absl::StrCat(NameOf(s), ": at most 65535 heads and sequences"));
  }
  return absl::OkStatus();
}

// A window that reaches past the start is none.
int64_t WindowOf(const AttentionShape& s) {
  return s.window >= s.sequence ? 0 : s.window;
}

SdpaShape WholeShape(const AttentionShape& s) {
  return {s.batch,     s.sequence,           s.heads,
          s.kv_heads,  s.head_dim,           WindowOf(s),
          s.qkv_dim(), s.heads * s.head_dim, s.documents.max_documents};
}

int64_t LargestDivisor(int64_t n, int64_t at_most) {
  for (int64_t d = std::min(n, at_most); d > 1; --d) {
    if (n % d == 0) return d;
  }
  return 1;
}

// `elements` BF16 elements on; null stays null.
const void* At(const void* base, int64_t elements) {
  if (base == nullptr) return nullptr;
  return static_cast<const bf16*>(base) + elements;
}
void* At(void* base, int64_t elements) {
  if (base == nullptr) return nullptr;
  return static_cast<bf16*>(base) + elements;
}

absl::Status CheckAligned(const SdpaPointers& p) {
  for (const void* address : {p.q, p.k, p.v, static_cast<const void*>(p.out),
                              p.d_out, static_cast<const void*>(p.d_q)}) {
    if (reinterpret_cast<uintptr_t>(address) % kAlignment != 0) {
      return absl::InvalidArgumentError(
          "attention operands must be aligned to 16 bytes");
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaAttention>> CudaAttention::Create(
    device::Device& device, CudaWorkspace& workspace,
    const CudaAttentionOptions& options) {
  std::unique_ptr<CudaAttention> attention(
      new CudaAttention(workspace, options));
  if (options.activation == ActDType::kBf16) {
    SDP_ASSIGN_OR_RETURN(attention->sdpa_, Sdpa::Create(device));
  }
  return attention;
}

CudaAttention::Key CudaAttention::KeyOf(const AttentionShape& s,
                                        bool backward) {
  return {s.batch,
          s.sequence,
          s.heads,
          s.kv_heads,
          s.head_dim,
          WindowOf(s),
          s.documents.max_documents,
          backward};
}

absl::StatusOr<bool> CudaAttention::IsFused(const AttentionShape& shape,
                                            bool backward) {
  const auto it = routes_.find(KeyOf(shape, backward));
  if (it == routes_.end()) {
    return absl::NotFoundError(
        absl::StrCat(NameOf(shape), " was never planned"));
  }
  return it->second.plan != nullptr;
}

absl::StatusOr<const CudaAttention::Route*> CudaAttention::RouteOf(
    const AttentionShape& shape, bool backward) {
  SDP_RETURN_IF_ERROR(CheckShape(shape));
  const Key key = KeyOf(shape, backward);
  auto it = routes_.find(key);
  if (it != routes_.end()) return &it->second;
  if (mode_ == PlanMode::kFrozen) {
    return absl::FailedPreconditionError(
        absl::StrCat(NameOf(shape), backward ? ", backward," : ", forward,",
                     " was not planned at warm-up; nothing is planned during "
                     "steps"));
  }
  SDP_RETURN_IF_ERROR(Plan(shape, backward));
  return &routes_.find(key)->second;
}

absl::StatusOr<CudaAttention::Route> CudaAttention::PlanFused(
    const AttentionShape& shape, bool backward) {
  const SdpaShape whole = WholeShape(shape);
  if (IsPacked(shape)) {
    if (options_.deterministic) {
      return absl::UnimplementedError(
          "a deterministic backward of packed documents takes workspace for "
          "each as if it were a whole sequence");
    }
    if (shape.head_dim > kPackedMaxHeadDim) {
      return absl::UnimplementedError(absl::StrCat(
          "its backward of packed documents is wrong for heads of more than ",
          kPackedMaxHeadDim));
    }
    if (shape.tokens() * shape.qkv_dim() > INT32_MAX) {
      return absl::UnimplementedError(
          "offsets of documents beyond 32 bits; a smaller micro_batch_size "
          "avoids that");
    }
  }
  if (backward && options_.deterministic) return PlanDeterministic(whole);
  SDP_ASSIGN_OR_RETURN(auto plan, backward ? sdpa_->PlanBackward(whole, false)
                                           : sdpa_->PlanForward(whole));
  return Route{std::move(plan), shape.batch, shape.kv_heads};
}

absl::Status CudaAttention::Plan(const AttentionShape& shape, bool backward) {
  absl::Status refused;
  if (sdpa_ != nullptr) {
    absl::StatusOr<Route> route = PlanFused(shape, backward);
    absl::StatusOr<Route> other = Route{};
    if (IsPacked(shape) && route.ok()) other = PlanFused(shape, !backward);
    for (const absl::Status& status : {route.status(), other.status()}) {
      if (!status.ok() && !absl::IsUnimplemented(status)) return status;
      refused.Update(status);
    }
    if (refused.ok()) {
      routes_.insert_or_assign(KeyOf(shape, backward), *std::move(route));
      if (IsPacked(shape)) {
        routes_.insert_or_assign(KeyOf(shape, !backward), *std::move(other));
      }
      return absl::OkStatus();
    }
  }
  if (shape.head_dim > kPlainAttentionMaxHeadDim) {
    return absl::UnimplementedError(
        absl::StrCat(NameOf(shape), ": heads of more than ",
                     kPlainAttentionMaxHeadDim, " are not supported"));
  }
  if (!refused.ok()) {
    spdlog::warn(
        "{}, {}: not by cuDNN ({}); the plain kernels run instead, which are "
        "many times slower",
        NameOf(shape),
        IsPacked(shape) ? "both directions"
                        : (backward ? "backward" : "forward"),
        std::string(refused.message()));
  }
  routes_.insert_or_assign(KeyOf(shape, backward), Route{});
  if (IsPacked(shape)) {
    routes_.insert_or_assign(KeyOf(shape, !backward), Route{});
  }
  return absl::OkStatus();
}

absl::StatusOr<CudaAttention::Route> CudaAttention::PlanDeterministic(
    const SdpaShape& whole) {
  const int64_t group = whole.heads / whole.kv_heads;
  SdpaShape part = whole;
  part.batch = 1;
  part.heads = group;
  part.kv_heads = 1;
  const size_t least = std::max<size_t>(1, DeterministicWorkspaceBytes(part));
  const auto parts =
      static_cast<int64_t>(options_.deterministic_workspace_bytes / least);
  if (parts == 0) {
    return absl::UnimplementedError(absl::StrCat(
        "the deterministic backward of one group of heads takes ",
        FormatBytes(least), " of workspace, more than the ",
        FormatBytes(options_.deterministic_workspace_bytes), " allowed"));
  }
  // Whole sequences while they fit; the statistics of a part must be packed,
  // which groups of heads of several sequences are not.
  if (parts >= whole.kv_heads) {
    part.batch = LargestDivisor(whole.batch, parts / whole.kv_heads);
    part.kv_heads = whole.kv_heads;
  } else {
    part.kv_heads = LargestDivisor(whole.kv_heads, parts);
  }
  part.heads = part.kv_heads * group;
  SDP_ASSIGN_OR_RETURN(auto plan, sdpa_->PlanBackward(part, true));
  return Route{std::move(plan), part.batch, part.kv_heads};
}

absl::Status CudaAttention::RunFused(const Route& route,
                                     const AttentionShape& s,
                                     const SdpaPointers& p, Stream& stream) {
  SDP_RETURN_IF_ERROR(CheckAligned(p));
  if (IsPacked(s)) return RunPacked(route, s, p, stream);
  SDP_ASSIGN_OR_RETURN(
      void* workspace,
      workspace_.Acquire(route.plan->workspace_bytes(), stream));
  const int64_t group = s.heads / s.kv_heads;
  for (int64_t b = 0; b < s.batch; b += route.batch) {
    for (int64_t kv = 0; kv < s.kv_heads; kv += route.kv_heads) {
      const int64_t row = b * s.sequence;
      const int64_t q = row * s.qkv_dim() + kv * group * s.head_dim;
      const int64_t k = row * s.qkv_dim() + kv * s.head_dim;
      const int64_t out = (row * s.heads + kv * group) * s.head_dim;
      SdpaPointers part = {};
      part.q = At(p.q, q);
      part.k = At(p.k, k);
      part.v = At(p.v, k);
      part.out = At(p.out, out);
      part.stats = p.stats + (b * s.heads + kv * group) * s.sequence;
      part.d_out = At(p.d_out, out);
      part.d_q = At(p.d_q, q);
      part.d_k = At(p.d_k, k);
      part.d_v = At(p.d_v, k);
      SDP_RETURN_IF_ERROR(
          Annotate(route.plan->Run(part, workspace, stream), NameOf(s)));
    }
  }
  return workspace_.Release(stream);
}

absl::Status CudaAttention::RunPacked(const Route& route,
                                      const AttentionShape& s, SdpaPointers p,
                                      Stream& stream) {
  const int64_t documents = s.documents.max_documents;
  const size_t rows_at =
      AlignUp(route.plan->workspace_bytes(), kWorkspaceAlignment);
  SDP_ASSIGN_OR_RETURN(
      void* workspace,
      workspace_.Acquire(rows_at + RaggedRowsBytes(documents), stream));
  p.rows = RaggedRowsIn(static_cast<char*>(workspace) + rows_at, documents);
  SDP_ASSIGN_OR_RETURN(cudaStream_t handle, device::UseCudaStream(stream));
  SDP_RETURN_IF_ERROR(device::CudaStatus(
      LaunchRaggedRows(s.documents.offsets, documents,
                       {s.qkv_dim(), s.heads * s.head_dim, s.heads}, p.rows,
                       handle),
      NameOf(s)));
  SDP_RETURN_IF_ERROR(
      Annotate(route.plan->Run(p, workspace, stream), NameOf(s)));
  return workspace_.Release(stream);
}

absl::Status CudaAttention::Forward(ConstAct qkv, const AttentionShape& shape,
                                    Act out, float* lse, Stream& stream) {
  SDP_ASSIGN_OR_RETURN(const Route* route, RouteOf(shape, false));
  const int64_t k = shape.heads * shape.head_dim;
  const int64_t v = k + shape.kv_heads * shape.head_dim;
  if (route->plan != nullptr) {
    SdpaPointers pointers = {};
    pointers.q = qkv;
    pointers.k = At(qkv, k);
    pointers.v = At(qkv, v);
    pointers.out = out;
    pointers.stats = lse;
    return RunFused(*route, shape, pointers, stream);
  }
  SDP_ASSIGN_OR_RETURN(cudaStream_t handle, device::UseCudaStream(stream));
  const cudaError_t launched =
      options_.activation == ActDType::kF32
          ? PlainAttentionForward(static_cast<const float*>(qkv), shape,
                                  static_cast<float*>(out), lse, handle)
          : PlainAttentionForward(static_cast<const bf16*>(qkv), shape,
                                  static_cast<bf16*>(out), lse, handle);
  return device::CudaStatus(launched, NameOf(shape));
}

absl::Status CudaAttention::Backward(ConstAct qkv, ConstAct out,
                                     const float* lse, ConstAct d_out,
                                     const AttentionShape& shape, Act d_qkv,
                                     Stream& stream) {
  SDP_ASSIGN_OR_RETURN(const Route* route, RouteOf(shape, true));
  const int64_t k = shape.heads * shape.head_dim;
  const int64_t v = k + shape.kv_heads * shape.head_dim;
  if (route->plan != nullptr) {
    const SdpaPointers pointers = {.q = qkv,
                                   .k = At(qkv, k),
                                   .v = At(qkv, v),
                                   .out = const_cast<void*>(out),
                                   .stats = const_cast<float*>(lse),
                                   .d_out = d_out,
                                   .d_q = d_qkv,
                                   .d_k = At(d_qkv, k),
                                   .d_v = At(d_qkv, v)};
    return RunFused(*route, shape, pointers, stream);
  }
  SDP_ASSIGN_OR_RETURN(cudaStream_t handle, device::UseCudaStream(stream));
  SDP_ASSIGN_OR_RETURN(
      void* workspace,
      workspace_.Acquire(shape.tokens() * shape.heads * sizeof(float), stream));
  auto* delta = static_cast<float*>(workspace);
  const cudaError_t launched =
      options_.activation == ActDType::kF32
          ? PlainAttentionBackward(static_cast<const float*>(qkv),
                                   static_cast<const float*>(out), lse,
                                   static_cast<const float*>(d_out), shape,
                                   delta, static_cast<float*>(d_qkv), handle)
          : PlainAttentionBackward(static_cast<const bf16*>(qkv),
                                   static_cast<const bf16*>(out), lse,
                                   static_cast<const bf16*>(d_out), shape,
                                   delta, static_cast<bf16*>(d_qkv), handle);
  SDP_RETURN_IF_ERROR(device::CudaStatus(launched, NameOf(shape)));
  return workspace_.Release(stream);
}

}  // namespace slidedp::ops
