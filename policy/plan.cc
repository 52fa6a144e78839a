#include "policy/plan.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "policy/fill_memory.h"
#include "policy/invalid.h"

namespace slidedp::policy {
namespace {

using model::UnitKind;

constexpr uint64_t kDefaultH2dChunkBytes = 16 * kMiB;
constexpr uint64_t kDefaultD2hChunkBytes = 8 * kMiB;
// A ring of 32 MiB: GPUs write into the CPU's cache, and what is read soon is
// read there. Measured where the update is the slowest part of a step: an
// eighth less time than with 256 MiB.
constexpr uint64_t kDefaultRingChunks = 4;
// 1 chunk in so many has a slot of its own: there, the update has these chunks
// to do during the next forward pass, which is a tenth to a fifth of the step.
constexpr uint64_t kOwnShare = 6;
// One that compute fills or reads, one that a copy does.
constexpr int kDefaultStageSlots = 2;
// Logits alive at once. A GPU's matrix products want 4,096 rows at a vocabulary
// of 150,000; a CPU wants them in its cache.
constexpr uint64_t kCpuLogitsBytes = 64 * kMiB;
constexpr uint64_t kCudaLogitsBytes = 1216 * kMiB;
constexpr int64_t kMaxHeadChunkTokens = 8192;
// More than this many tokens in one micro-batch, or steps' places, is a typing
// error rather than a plan.
constexpr int64_t kMaxMicroBatchTokens = int64_t{1} << 24;
constexpr int64_t kMaxMicroBatches = int64_t{1} << 20;
constexpr int kMaxRanks = 64;
constexpr uint64_t kMostSlots = 65536;

uint64_t LargestDecoder(const model::StateLayout& layout) {
  uint64_t largest = 0;
  for (const model::Unit& unit : layout.units) {
    if (unit.kind == UnitKind::kDecoder) {
      largest = std::max(largest, unit.count);
    }
  }
  return largest;
}

// A GPU's worker keeps two threads busy at most, and the update wants all of
// the host's memory bandwidth; a CPU rank computes with the same processors.
int UpdateThreads(const Problem& problem) {
  const int half = std::max(1, problem.logical_cpus / 2);
  return problem.device == DeviceKind::kCpu
             ? half
             : std::max(half, problem.logical_cpus - 2 * problem.ranks);
}

// For a plan whose routes and chunks are chosen.
uint64_t OwnChunks(const model::StateLayout& layout, const Plan& plan) {
  uint64_t most = 0;
  for (const auto& chunks : MakeGradSchedule(layout, plan).chunks) {
    most = std::max<uint64_t>(most, chunks.size());
  }
  return std::min(most / kOwnShare, kMostSlots);
}

absl::Status CheckRoutes(const Problem& problem) {
  if (problem.peer_access || problem.ranks == 1) return absl::OkStatus();
  const RouteChoice all = {problem.params, problem.grads, problem.reduce};
  const std::pair<const char*, const RouteChoice*> choices[] = {
      {"routes", &all},
      {"tuning.embedding_routes", &problem.embedding},
      {"tuning.decoder_routes", &problem.decoder},
      {"tuning.head_routes", &problem.head}};
  for (const auto& [field, choice] : choices) {
    if (choice->params == ParamRoute::kSharded) {
      return InvalidInput("", absl::StrCat(field, ".params"),
                          Name(*choice->params),
                          "the ranks' devices cannot exchange data",
                          "use full, or leave it out");
    }
    if (choice->grads.has_value() && choice->grads != GradRoute::kCpu) {
      return InvalidInput("", absl::StrCat(field, ".grads"),
                          Name(*choice->grads),
                          "the ranks' devices cannot exchange data",
                          "use cpu, or leave it out");
    }
  }
  return absl::OkStatus();
}

}  // namespace

const Routes& Plan::routes(UnitKind kind) const {
  switch (kind) {
    case UnitKind::kEmbedding:
      return embedding;
    case UnitKind::kDecoder:
      return decoder;
    case UnitKind::kHead:
      return head;
  }
  SDP_CHECK(false, "unit kind");
}

uint64_t PlanHash(const Plan& plan) {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  auto add = [&hash](uint64_t value) {
    for (int i = 0; i < 8; ++i) {
      hash = (hash ^ ((value >> (8 * i)) & 0xff)) * 1099511628211u;
    }
  };
  for (const Routes* r : {&plan.embedding, &plan.decoder, &plan.head}) {
    add(static_cast<uint64_t>(r->params));
    add(static_cast<uint64_t>(r->grads));
    add(static_cast<uint64_t>(r->reduce));
  }
  add(plan.ranks);
  add(static_cast<uint64_t>(plan.update_mode));
  add(static_cast<uint64_t>(plan.device));
  add(plan.sequence_length);
  add(plan.micro_batch_size);
  add(plan.micro_batches);
  add(plan.documents_per_sequence);
  add(plan.h2d_chunk_bytes);
  add(plan.d2h_chunk_bytes);
  add(plan.window_slots);
  add(plan.grad_slots);
  add(plan.own_chunks);
  add(plan.ring_chunks);
  add(plan.head_chunk_tokens);
  add(plan.keep.size());
  for (uint8_t mask : plan.keep) add(mask);
  add(plan.offload_permille.size());
  for (uint16_t permille : plan.offload_permille) add(permille);
  add(plan.stage_slots);
  add(plan.float32);
  add(plan.deterministic);
  return hash;
}

uint64_t ShardElements(uint64_t count, int ranks) {
  return AlignUp(CeilDiv(count, static_cast<uint64_t>(ranks)), kShardAlignment);
}

absl::StatusOr<Plan> MakePlan(const Problem& problem) {
  if (problem.ranks < 1 || problem.ranks > kMaxRanks) {
    return Invalid("ranks", problem.ranks, "out of range",
                   absl::StrCat("choose 1 to ", kMaxRanks));
  }
  if (problem.sequence_length < 1) {
    return Invalid("sequence_length", problem.sequence_length,
                   "must be at least 1",
                   "choose the number of tokens of a sequence");
  }
  if (problem.micro_batch_size < 1 ||
      problem.micro_batch_size >
          kMaxMicroBatchTokens / problem.sequence_length) {
    return Invalid("micro_batch_size", problem.micro_batch_size,
                   absl::StrCat("with sequence_length ",
                                problem.sequence_length, " out of range"),
                   absl::StrCat("keep micro_batch_size x sequence_length "
                                "between 1 and ",
                                kMaxMicroBatchTokens));
  }
  if (problem.batch_size < 1 ||
      CeilDiv(problem.batch_size, problem.micro_batch_size) >
          static_cast<uint64_t>(kMaxMicroBatches)) {
    return Invalid("batch_size", problem.batch_size, "out of range",
                   absl::StrCat("choose 1 to ", kMaxMicroBatches,
                                " micro-batches of sequences"));
  }
  SDP_RETURN_IF_ERROR(CheckRoutes(problem));

  const model::StateLayout layout = model::MakeStateLayout(problem.config);
  const uint64_t act_bytes =
      problem.float32 || problem.device == DeviceKind::kCpu ? 4 : 2;
  const bool exchange = problem.peer_access && problem.ranks > 1;
  Plan plan;
  plan.ranks = problem.ranks;
  plan.device = problem.device;
  plan.sequence_length = problem.sequence_length;
  plan.micro_batch_size = problem.micro_batch_size;
  plan.micro_batches = static_cast<int64_t>(
      CeilDiv(problem.batch_size,
              static_cast<uint64_t>(problem.ranks) * problem.micro_batch_size));
  plan.update_mode = problem.update_mode.value_or(
      problem.clipping ? UpdateMode::kSpeculative : UpdateMode::kEager);
  if (problem.clipping != (plan.update_mode != UpdateMode::kEager)) {
    return InvalidInput("", "update", Name(plan.update_mode),
                        problem.clipping
                            ? "applies gradients before their norm is known"
                            : "has a use only with max_grad_norm",
                        "leave it out");
  }
  plan.float32 = problem.float32 || problem.device == DeviceKind::kCpu;
  plan.deterministic = problem.deterministic;
  plan.gpu_memory_limit_bytes = problem.gpu_memory_limit_bytes;
  Routes routes;
  // Two GPUs with a link to the host each: the copy of everything hides behind
  // compute, and an exchange would take a part of it (measured on two H200:
  // full is 1.6 % faster). Beyond, the host's memory could not feed them all.
  routes.params = problem.params.value_or(
      exchange && problem.ranks > 2 ? ParamRoute::kSharded : ParamRoute::kFull);
  routes.grads = problem.grads.value_or(
      exchange ? GradRoute::kGpuSharded
               : (problem.ranks > 1 ? GradRoute::kCpu : GradRoute::kGpuRoot));
  routes.reduce = problem.reduce.value_or(ReduceDType::kF32);
  const auto chosen = [&routes](const RouteChoice& choice) {
    return Routes{choice.params.value_or(routes.params),
                  choice.grads.value_or(routes.grads),
                  choice.reduce.value_or(routes.reduce)};
  };
  plan.embedding = chosen(problem.embedding);
  plan.decoder = chosen(problem.decoder);
  plan.head = chosen(problem.head);

  const uint64_t decoder_bytes = std::max<uint64_t>(
      kPageBytes, AlignUp(LargestDecoder(layout) * 2, kPageBytes));
  auto chunk = [](absl::string_view field, uint64_t chosen,
                  uint64_t fallback) -> absl::StatusOr<uint64_t> {
    if (chosen == 0) return fallback;
    if (chosen % 128 != 0 || chosen < 128 || chosen > kGiB) {
      return InvalidInput("", field, absl::StrCat(chosen),
                          "not a usable chunk size",
                          "choose a multiple of 128 up to 1 GiB");
    }
    return chosen;
  };
  SDP_ASSIGN_OR_RETURN(plan.h2d_chunk_bytes,
                       chunk("tuning.h2d_chunk_bytes", problem.h2d_chunk_bytes,
                             kDefaultH2dChunkBytes));
  SDP_ASSIGN_OR_RETURN(plan.d2h_chunk_bytes,
                       chunk("tuning.d2h_chunk_bytes", problem.d2h_chunk_bytes,
                             std::min(kDefaultD2hChunkBytes, decoder_bytes)));
  auto slots = [&](absl::string_view field, int chosen,
                   int fallback) -> absl::StatusOr<int> {
    if (chosen == 0) return fallback;
    if (chosen < 1 || chosen > 1024) {
      return Invalid(field, chosen, "out of range", "choose 1 to 1024");
    }
    return chosen;
  };
  const int layers = static_cast<int>(problem.config.layers);
  SDP_ASSIGN_OR_RETURN(
      plan.window_slots,
      slots("tuning.window_slots", problem.window_slots, std::min(3, layers)));
  SDP_ASSIGN_OR_RETURN(
      plan.grad_slots,
      slots("tuning.grad_slots", problem.grad_slots, std::min(2, layers)));
  SDP_ASSIGN_OR_RETURN(
      plan.stage_slots,
      slots("tuning.stage_slots", problem.stage_slots, kDefaultStageSlots));
  SDP_ASSIGN_OR_RETURN(
      plan.compute_threads,
      slots("tuning.compute_threads", problem.compute_threads,
            problem.device == DeviceKind::kCpu
                ? std::max(1, problem.logical_cpus / problem.ranks)
                : 1));
  SDP_ASSIGN_OR_RETURN(plan.update_threads,
                       slots("tuning.update_threads", problem.update_threads,
                             UpdateThreads(problem)));
  for (const auto& [field, chosen] :
       {std::pair{"tuning.ring_chunks", problem.ring_chunks},
        {"tuning.own_chunks", problem.own_chunks}}) {
    if (chosen > kMostSlots) {
      return Invalid(field, static_cast<int64_t>(chosen), "out of range",
                     absl::StrCat("choose 1 to ", kMostSlots));
    }
  }
  plan.ring_chunks =
      problem.ring_chunks == 0 ? kDefaultRingChunks : problem.ring_chunks;
  plan.own_chunks =
      problem.own_chunks == 0 ? OwnChunks(layout, plan) : problem.own_chunks;
  if (problem.documents_per_sequence < 0 ||
      problem.documents_per_sequence > problem.sequence_length) {
    return Invalid("documents_per_sequence", problem.documents_per_sequence,
                   "out of range",
                   absl::StrCat("choose 0 to ", problem.sequence_length));
  }
  plan.documents_per_sequence = problem.documents_per_sequence;
  plan.head_chunk_tokens = problem.head_chunk_tokens;
  if (plan.head_chunk_tokens < 0) {
    return Invalid("tuning.head_chunk_tokens", plan.head_chunk_tokens,
                   "out of range", "choose at least 1");
  }
  if (plan.head_chunk_tokens == 0) {
    const bool cpu = problem.device == DeviceKind::kCpu;
    const int64_t grain = cpu ? 16 : 256;
    const int64_t rows =
        static_cast<int64_t>((cpu ? kCpuLogitsBytes : kCudaLogitsBytes) /
                             (problem.config.vocab * act_bytes));
    plan.head_chunk_tokens =
        std::clamp(rows / grain * grain, grain, kMaxHeadChunkTokens);
  }
  plan.head_chunk_tokens =
      std::min(plan.head_chunk_tokens, plan.micro_batch_tokens());
  SDP_RETURN_IF_ERROR(FillMemory(problem, layout, plan));
  return plan;
}

absl::string_view Name(ParamRoute route) {
  return route == ParamRoute::kFull ? "full" : "sharded";
}
absl::string_view Name(GradRoute route) {
  switch (route) {
    case GradRoute::kGpuRoot:
      return "gpu_root";
    case GradRoute::kGpuSharded:
      return "gpu_sharded";
    case GradRoute::kCpu:
      return "cpu";
  }
  return "?";
}
absl::string_view Name(ReduceDType dtype) {
  return dtype == ReduceDType::kF32 ? "fp32" : "bf16";
}
absl::string_view Name(UpdateMode mode) {
  switch (mode) {
    case UpdateMode::kEager:
      return "eager";
    case UpdateMode::kDeferred:
      return "deferred";
    case UpdateMode::kSpeculative:
      return "speculative";
  }
  SDP_CHECK(false, "update mode");
}

}  // namespace slidedp::policy
