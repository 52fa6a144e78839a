// The plan of a job: routes, chunks, window and update mode, and what follows
// from it for everyone alike: which rank drains which gradient chunk when, and
// how many bytes everything takes. Pure: no clock, no files, no logging.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/model/layout.h"

namespace slidedp::policy {

enum class ParamRoute { kFull, kSharded };
enum class GradRoute { kGpuRoot, kGpuSharded, kCpu };
enum class ReduceDType { kF32, kBf16 };
enum class UpdateMode { kEager, kDeferred, kSpeculative };
enum class DeviceKind { kCpu, kCuda };

// The segments of a decoder layer whose outputs may be kept for its backward
// pass instead of being computed again. A layer's mask has bit s for segment s;
// the layer's input is always kept. (Elastic checkpointing, architecture 5.)
enum class Segment {
  kInputNorm,  // [tokens, hidden]
  kQkv,        // projections with bias, [tokens, qkv_dim]
  kRotated,    // after QK-norm and rope, [tokens, qkv_dim]
  kAttention,  // [tokens, q_dim] and log-sum-exp [tokens, heads] float32
  kMiddle,     // after the first residual, [tokens, hidden]
  kPostNorm,   // [tokens, hidden]
  kGateUp,     // [tokens, 2 * intermediate]
};
inline constexpr int kSegments = 7;
constexpr uint8_t Bit(Segment segment) {
  return static_cast<uint8_t>(1u << static_cast<int>(segment));
}
// No matrix product and no attention is computed again; norms and rope are.
inline constexpr uint8_t kKeepAll =
    Bit(Segment::kQkv) | Bit(Segment::kAttention) | Bit(Segment::kMiddle) |
    Bit(Segment::kGateUp);
// A third of the bytes; the MLP's first product is computed again.
inline constexpr uint8_t kKeepSelective =
    Bit(Segment::kQkv) | Bit(Segment::kAttention) | Bit(Segment::kMiddle);
// Plan::offload_permille of a layer whose activations all go to the host.
inline constexpr uint16_t kOffloadAll = 1000;

struct Routes {
  ParamRoute params = ParamRoute::kFull;
  GradRoute grads = GradRoute::kGpuRoot;
  ReduceDType reduce = ReduceDType::kF32;
  bool operator==(const Routes&) const = default;
};

struct Plan {
  int ranks = 1;
  Routes embedding, decoder, head;
  UpdateMode update_mode = UpdateMode::kDeferred;
  DeviceKind device = DeviceKind::kCpu;
  int64_t sequence_length = 0;
  int64_t micro_batch_size = 0;  // sequences
  int64_t micro_batches = 0;     // per rank and step
  // Of the fullest sequence, its padding counted as one; 0: not packed.
  int64_t documents_per_sequence = 0;
  uint64_t h2d_chunk_bytes = 0;
  uint64_t d2h_chunk_bytes = 0;
  int window_slots = 2;  // decoder units on the device
  int grad_slots = 2;    // decoder gradient accumulators on the device
  // Eager: gradient chunks of each rank (GradSchedule).
  uint64_t own_chunks = 0;
  uint64_t ring_chunks = 0;
  int64_t head_chunk_tokens = 0;
  int compute_threads = 1;
  int update_threads = 1;
  std::vector<uint8_t> keep;  // Segment mask of each decoder layer
  // Share of what each layer keeps, its input included, that waits in pinned
  // host memory for the backward pass; 0 to kOffloadAll (policy/activations.h).
  std::vector<uint16_t> offload_permille;
  int stage_slots = 2;   // micro-batches on their way to or from the host
  bool float32 = false;  // compute in float32 (a CPU rank always does)
  bool deterministic = false;
  uint64_t gpu_memory_limit_bytes = 0;  // 0: the GPU's own

  const Routes& routes(model::UnitKind kind) const;
  int64_t micro_batch_tokens() const {
    return micro_batch_size * sequence_length;
  }
  int64_t micro_batch_documents() const {
    return micro_batch_size * documents_per_sequence;
  }
  // What a rank uploads for a step, in int32: ids, labels and, packed, the
  // micro-batches' ops::Documents, first rows before offsets.
  int64_t batch_ints() const {
    const int64_t arrays = documents_per_sequence == 0 ? 2 : 3;
    const int64_t offsets =
        documents_per_sequence == 0 ? 0 : micro_batch_documents() + 1;
    return micro_batches * (arrays * micro_batch_tokens() + offsets);
  }
};
uint64_t PlanHash(const Plan& plan);

// A range of a unit's gradient that is reduced and drained as one, as soon as
// it is final: [begin, end), elements from the unit's start. Decoder units are
// cut before o_proj, post_attention_layernorm and down_proj, whose gradients a
// backward pass finishes in the opposite order, unless hostd sums the unit. A
// cut is moved up to a multiple of ranks * 64, so that equal shards cover a
// bucket, and only the unit's last one is padded.
struct GradBucket {
  int unit;
  uint64_t begin, end;
};

// A range of a unit's gradient that one chunk carries.
struct GradChunk {
  int bucket;
  int unit;
  uint64_t begin;  // elements from the unit's start
  uint64_t count;
};

// Who drains what, in which order. Units go in backward order (last to first;
// wholly frozen ones are left out), their buckets too, chunks within a bucket
// by ascending position. `gpu_root`: rank 0 drains the whole bucket;
// `gpu_sharded`: each rank its shard; `cpu`: every rank all of it.
//
// The first chunks of a step have slots of their own in `grads`: in eager mode
// some, otherwise all. Nobody waits for those: when a rank writes there again
// it has computed with parameters that were published after the slot was read.
// So the first units' updates may wait for threads until the next forward pass
// comes to them, which is late. The other chunks of the step take turns in a
// ring.
struct GradSchedule {
  std::vector<GradBucket> buckets;  // in the order of draining
  // Per rank, the sequence of one step.
  std::vector<std::vector<GradChunk>> chunks;
  uint64_t chunk_elements;  // the most that a chunk carries
  // Slots of each rank: of their own, and of the ring.
  std::vector<uint64_t> own, ring;
  // Bytes from the start of `grads` to each slot of each rank. A slot of the
  // ring holds any chunk, another its own.
  std::vector<std::vector<uint64_t>> slot_offsets;
  uint64_t grads_bytes;

  uint64_t slots(int rank) const { return own[rank] + ring[rank]; }
  // Of chunk `chunk_number`, counted over all steps.
  uint64_t slot_offset_bytes(int rank, uint64_t chunk_number) const {
    const uint64_t index = chunk_number % chunks[rank].size();
    return slot_offsets[rank]
                       [index < own[rank]
                            ? index
                            : own[rank] + (index - own[rank]) % ring[rank]];
  }
  // How many chunks of a step must be free (shm::Versions::grad_free) before
  // those below `end` may be written.
  uint64_t FreeBefore(int rank, uint64_t end) const {
    return end > slots(rank) ? end - ring[rank] : 0;
  }
  // How many may be written when so many are free.
  uint64_t WrittenAtMost(int rank, uint64_t free) const {
    return std::max(free, own[rank]) + ring[rank];
  }
};
GradSchedule MakeGradSchedule(const model::StateLayout& layout,
                              const Plan& plan);
// Its buckets alone.
std::vector<GradBucket> MakeGradBuckets(const model::StateLayout& layout,
                                        const Plan& plan);
// Where the rank's shard of the bucket begins and ends, `gpu_sharded`.
struct GradShard {
  uint64_t begin, end;  // elements from the unit's start
};
GradShard ShardOf(const GradBucket& bucket, int rank, int ranks);

// Rows of the embedding table, whose use by a step's batch ranks report: a row
// that no rank uses has no gradient, so hostd updates it before the gradients
// come. 0 when tied: the head's part reaches every row; and when it is frozen.
uint64_t ReportedRows(const model::StateLayout& layout);

// Whether ranks write only those rows of the embedding's chunks that any rank's
// batch uses: nobody reads the others. Not where hostd sums the ranks' chunks,
// which takes them whole.
bool DrainsUsedRows(const model::StateLayout& layout, const Plan& plan);

inline constexpr uint64_t kShardAlignment = 64;
// Elements of each of `ranks` equal shards that cover `count` elements of a
// unit; a multiple of kShardAlignment. The last shard may reach past their end.
uint64_t ShardElements(uint64_t count, int ranks);

struct NamedBytes {
  std::string name;
  uint64_t bytes;
};

// Host segments of a job, to the byte: "params", "state", "grads", "versions",
// "reports", "exchange" (CPU ranks; 0 bytes are left out).
std::vector<NamedBytes> HostSegments(const model::StateLayout& layout,
                                     const Plan& plan);
uint64_t SegmentBytes(const std::vector<NamedBytes>& segments,
                      const std::string& name);

// The `state` segment's planes, in bytes from its start.
struct StatePlanes {
  uint64_t lo, m, v;
  // Reduced BF16 gradients summed by hostd: `cpu` route in deferred mode only;
  // otherwise equal to `bytes`.
  uint64_t reduced;
  uint64_t bytes;
};
StatePlanes MakeStatePlanes(const model::StateLayout& layout, const Plan& plan);

// CPU ranks' collective: staging bytes of each rank, per communicator (there
// are two: one for parameters, one for gradients).
uint64_t ExchangeStagingBytes(const Plan& plan);
inline constexpr int kCommunicators = 2;

// Every device buffer of one rank, to the byte; "pinned." ones are host memory
// that the device copies from. "ops.scratch" is what the CPU ops keep.
inline constexpr uint64_t kCpuScratchBytes = uint64_t{32} << 20;
std::vector<NamedBytes> DeviceBuffers(const model::ModelConfig& config,
                                      const model::StateLayout& layout,
                                      const Plan& plan);

struct RouteChoice {
  std::optional<ParamRoute> params;
  std::optional<GradRoute> grads;
  std::optional<ReduceDType> reduce;
};

// What a plan is made from.
struct Problem {
  model::ModelConfig config;
  int ranks = 1;
  DeviceKind device = DeviceKind::kCpu;
  bool peer_access = true;  // ranks can reduce among their devices
  int logical_cpus = 1;     // of the host
  int64_t sequence_length = 0;
  int64_t batch_size = 0;
  int64_t micro_batch_size = 0;
  int64_t documents_per_sequence = 0;  // as in Plan
  bool clipping = true;
  // The user's choices; unset: policy chooses.
  std::optional<ParamRoute> params;
  std::optional<GradRoute> grads;
  std::optional<ReduceDType> reduce;
  RouteChoice embedding, decoder, head;  // of one kind of unit; come first
  uint64_t h2d_chunk_bytes = 0, d2h_chunk_bytes = 0;
  uint64_t own_chunks = 0, ring_chunks = 0;
  int window_slots = 0, grad_slots = 0;
  int64_t head_chunk_tokens = 0;
  int compute_threads = 0, update_threads = 0;
  std::optional<UpdateMode> update_mode;
  std::optional<int> kept_layers;  // unset: as many as fit the memory
  uint8_t keep_mask = 0;           // of the other layers
  // Instead of both: of each layer, or one value for all; empty: policy
  // chooses.
  std::vector<uint8_t> keep;
  std::vector<uint16_t> offload_permille;
  int stage_slots = 0;
  // What the buffers of a plan, "pinned." ones apart, may take on a device; 0:
  // unknown, nothing is kept unless kept_layers says so.
  uint64_t device_memory_bytes = 0;
  uint64_t gpu_memory_limit_bytes = 0;
  bool float32 = false;
  bool deterministic = false;
};
absl::StatusOr<Plan> MakePlan(const Problem& problem);

absl::string_view Name(ParamRoute route);
absl::string_view Name(GradRoute route);
absl::string_view Name(ReduceDType dtype);
absl::string_view Name(UpdateMode mode);

}  // namespace slidedp::policy
