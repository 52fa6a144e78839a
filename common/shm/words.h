// The 64-bit words through which hostd and the ranks synchronise
// (architecture section 4). No locks: every word has one writer and its own
// cache line, and a process may die anywhere.
//
// Counting: step t is 0-based. `param_version[u] == t` means that t updates
// have been applied to unit u, so step t may read it when the word is >= t.
// Gradient chunks of a rank form one sequence over all steps: chunk s of step t
// (policy::GradSchedule) has number t * chunks_per_step(rank) + s.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "common/base/units.h"

namespace slidedp::shm {

struct alignas(kCacheLineBytes) Word {
  std::atomic<uint64_t> value;
};
static_assert(sizeof(Word) == kCacheLineBytes);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

inline constexpr uint64_t kVersionsMagic = 0x534c444556455253;  // SLDEVERS
inline constexpr uint64_t kReportsMagic = 0x534c444552455053;   // SLDEREPS
inline constexpr uint64_t kWordsLayoutVersion = 5;

// First line of both segments. Written once by hostd before hand-over.
struct alignas(kCacheLineBytes) WordsHeader {
  uint64_t magic;
  uint64_t layout_version;
  uint64_t world_size;
  uint64_t units;
  uint64_t state_layout_hash;  // model::StateLayout::hash
  uint64_t plan_hash;          // policy::PlanHash
  uint64_t rows;               // policy::ReportedRows
  uint64_t buckets;            // policy::GradSchedule
};

// Reasons in the abort word; 0 means go on.
enum class AbortReason : uint64_t {
  kNone = 0,
  kCancelled = 1,
  kRankLost = 2,
  kJobFailed = 3,
  kShutdown = 4,
};

// `versions`: every field is written by hostd only.
class Versions {
 public:
  static uint64_t Bytes(uint64_t world_size, uint64_t units);
  // Daemon: writes the header over zeroed memory.
  static Versions Initialise(void* data, const WordsHeader& header);
  // Worker: checks magic, layout version, sizes and hashes.
  static absl::Status Check(const void* data, uint64_t bytes,
                            const WordsHeader& expected);
  explicit Versions(void* data) : data_(static_cast<char*>(data)) {}

  std::atomic<uint64_t>& abort() const;      // AbortReason
  std::atomic<uint64_t>& heartbeat() const;  // MonotonicNs
  // Chunks of the rank consumed, as a prefix of its sequence, in which chunks
  // with slots of their own (policy::GradSchedule) count at once.
  std::atomic<uint64_t>& grad_free(uint64_t rank) const;
  std::atomic<uint64_t>& param_version(uint64_t unit) const;

 private:
  char* data_;
};

// What one rank says of one step. `begun`, `valid_tokens`, and the times are
// stored by the rank's host thread, `embedded` by its compute stream,
// `loss_sum` and `loss_ready` by its D2H stream; each flag is stored last
// (release) with step + 1.
struct StepReport {
  Word begun;
  Word loss_ready;  // before the step's first gradient chunk
  Word times_ready;
  Word
      embedded;  // the rank's reads of the embedding unit's parameters are over
  alignas(kCacheLineBytes) uint64_t valid_tokens;  // of all ranks
  int64_t begin_ns;                                // MonotonicNs
  int64_t end_ns;
  // Busy time by lane: parameter delivery, compute, reduction, gradient D2H,
  // and compute's waiting for parameters.
  int64_t deliver_ns, compute_ns, reduce_ns, drain_ns, stall_ns;
  alignas(kCacheLineBytes) double loss_sum;  // this rank's, over its tokens
  // Activations on their way to and from the host, and compute's waiting for
  // them, which stall_ns includes.
  alignas(kCacheLineBytes) int64_t offload_ns;
  int64_t offload_wait_ns;
};
inline constexpr uint64_t kStepReportSlots = 4;  // slot = step % 4

constexpr uint64_t RowWords(uint64_t rows) { return CeilDiv(rows, 64); }

// `reports`: the fields of rank r are written by rank r only; the other ranks
// read its `begun` and used rows. hostd treats all of it as hostile: it copies
// a value once, then checks it.
class Reports {
 public:
  static uint64_t Bytes(uint64_t world_size, uint64_t buckets, uint64_t rows);
  static Reports Initialise(void* data, const WordsHeader& header);
  static absl::Status Check(const void* data, uint64_t bytes,
                            const WordsHeader& expected);
  Reports(void* data, uint64_t buckets, uint64_t rows)
      : data_(static_cast<char*>(data)), buckets_(buckets), rows_(rows) {}

  std::atomic<uint64_t>& heartbeat(uint64_t rank) const;  // MonotonicNs
  // Chunks of the rank written to `grads`; the D2H stream's word.
  std::atomic<uint64_t>& grad_ready(uint64_t rank) const;
  StepReport& step(uint64_t rank, uint64_t step) const;
  // Squared norm of what the rank drains of the bucket (BF16, as drained), of
  // the latest step. Written by the D2H stream before the bucket's first chunk.
  // 0 for a rank that drains nothing of it.
  double& square_norm(uint64_t rank, uint64_t bucket) const;
  // RowWords(rows) words: bit i of word w is set if the rank's batch of the
  // step has token 64 w + i; bits from `rows` on are 0. Written by the rank's
  // host thread before `begun`. Two buffers take turns (step % 2): when a rank
  // may begin step s, hostd and the D2H streams of all ranks have read those of
  // step s - 2. (It begins s when it has seen the embedding unit's version
  // s - 1, which hostd publishes when all of its chunks of step s - 2 are
  // there; a D2H stream reads the rows before its first one.) Null without
  // rows.
  uint64_t* used_rows(uint64_t rank, uint64_t step) const;

 private:
  char* data_;
  uint64_t buckets_, rows_;
};

}  // namespace slidedp::shm
