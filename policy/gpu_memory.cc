#include "policy/gpu_memory.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/collective/exchange.h"

namespace slidedp::policy {
namespace {

// cuBLASLt's.
constexpr uint64_t kGemmWorkspaceBytes = 64 * kMiB;
// What the deterministic attention is cut down to (worker/ops).
constexpr uint64_t kDeterministicWorkspaceBytes = 4 * kGiB;

bool OnGpu(const NamedBytes& buffer) {
  return !absl::StartsWith(buffer.name, "pinned.");
}

// cuDNN's attention sums the queries' gradients in float32 and keeps a second
// array of that size (measured: 8 bytes per token and query element).
uint64_t AttentionWorkspaceBytes(const Problem& problem) {
  if (problem.deterministic) return kDeterministicWorkspaceBytes;
  const auto tokens = static_cast<uint64_t>(problem.micro_batch_size) *
                      static_cast<uint64_t>(problem.sequence_length);
  if (problem.documents_per_sequence > 0) {
    // Packed: the queries' gradients in rows of the fused buffer, those of keys
    // and values in rows for every query head, all float32; two statistics.
    const model::ModelConfig& config = problem.config;
    const uint64_t group = config.heads / config.kv_heads;
    const uint64_t rows = group == 1 ? 1 : 1 + 2 * group;
    return tokens * 4 * (rows * config.qkv_dim() + 2 * config.heads);
  }
  return 8 * tokens * static_cast<uint64_t>(problem.config.q_dim());
}

// Of the largest matrix, as float32.
uint64_t WidenedBytes(const Problem& problem) {
  if (!problem.float32) return 0;
  const model::ModelConfig& config = problem.config;
  const uint64_t rows =
      std::max<uint64_t>({static_cast<uint64_t>(config.vocab),
                          2 * static_cast<uint64_t>(config.intermediate),
                          static_cast<uint64_t>(config.qkv_dim())});
  return 4 * rows * static_cast<uint64_t>(config.hidden);
}

}  // namespace

std::vector<NamedBytes> GpuAllowance(const Problem& problem) {
  std::vector<NamedBytes> parts = {
      {"cuda", kGpuContextBytes},
      {"ops.workspace", kGemmWorkspaceBytes + AttentionWorkspaceBytes(problem) +
                            WidenedBytes(problem)}};
  if (problem.ranks > 1) {
    parts.push_back({"nccl", kCommunicators * kGpuCommunicatorBytes});
    parts.push_back({"peers", collective::kParamStagingBytes +
                                  collective::kGradStagingBytes});
  }
  return parts;
}

absl::StatusOr<uint64_t> GpuBufferBytes(const Problem& problem,
                                        uint64_t gpu_bytes) {
  uint64_t allowance = 0;
  for (const NamedBytes& part : GpuAllowance(problem)) allowance += part.bytes;
  const uint64_t limit = problem.gpu_memory_limit_bytes;
  const uint64_t usable = limit == 0 ? gpu_bytes : std::min(limit, gpu_bytes);
  if (usable > allowance) return usable - allowance;
  const std::string problem_text =
      absl::StrCat("leaves nothing beside the ", FormatBytes(allowance),
                   " that CUDA, its libraries and their workspace take");
  if (limit != 0 && limit < gpu_bytes) {
    return InvalidInput("", "tuning.gpu_memory_limit_gib", FormatBytes(limit),
                        problem_text, "raise it, or shorten the micro-batches");
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("a GPU of ", FormatBytes(gpu_bytes), " ", problem_text,
                   "; use shorter micro-batches or another GPU"));
}

uint64_t GpuBytes(const std::vector<NamedBytes>& device_buffers) {
  uint64_t bytes = 0;
  for (const NamedBytes& buffer : device_buffers) {
    if (OnGpu(buffer)) bytes += buffer.bytes;
  }
  return bytes;
}

}  // namespace slidedp::policy
