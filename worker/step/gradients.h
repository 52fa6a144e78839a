// Gradient accumulators on the device and their way down: bucket by bucket
// (policy::GradBucket), as a backward pass finishes them, reduced by the unit's
// route and drained to `grads` in chunks that are announced one by one.
//
// Of an untied embedding, only rows that some rank's batch uses go down, to
// where they would lie among the others (policy::DrainsUsedRows).
//
// A unit takes an accumulator that is zero but for the gradients of matrices
// that products write: these hold anything until their first product, and those
// of what is frozen until they are reduced.
//
// Decoder units take turns in `grad_slots` accumulators. The ends share
// another: a head's gradient has long gone when the embedding's begins, and a
// tied embedding's lives through the whole backward pass. The three streams
// gate each other by events and the daemon by words; nothing here blocks the
// host.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/collective/collective.h"
#include "common/device/device.h"
#include "common/model/layout.h"
#include "common/shm/segment.h"
#include "common/shm/words.h"
#include "policy/plan.h"
#include "worker/ops/ops.h"
#include "worker/step/buffers.h"
#include "worker/step/lane_times.h"

namespace slidedp::step {

class Gradients {
 public:
  struct Inputs {
    device::Device* device;
    ops::Ops* ops;
    collective::Collective* collective;  // null with one rank
    const model::StateLayout* layout;
    const policy::Plan* plan;
    int rank;
    const shm::Mapping* grads;
    shm::Versions versions;
    shm::Reports reports;
    const Buffers* buffers;
    LaneTimes* times;
    // Gradients go no further than their accumulators.
    bool compute_only = false;
  };
  static absl::StatusOr<Gradients> Create(const Inputs& inputs);
  // The most waits for free chunks that a step shows.
  static int64_t Waits(const model::StateLayout& layout,
                       const policy::Plan& plan, int rank);

  // The unit's accumulator, ready for what comes next on `compute`.
  absl::StatusOr<float*> Begin(int unit, device::Stream& compute);
  // As Begin returned it.
  float* accumulator(int unit) { return SlotOf(unit).sum; }
  // Everything that adds to the accumulator from element `from` on has been
  // enqueued on `compute`: reduce the buckets that lie there and drain this
  // rank's share of them. Descending; 0 ends the unit. Units must come in the
  // order of policy::GradSchedule. A frozen unit's goes nowhere.
  absl::Status Finish(int unit, uint64_t from, uint64_t step,
                      device::Stream& compute);
  // This rank's sum of token losses, before the step's first chunk.
  absl::Status DrainLoss(const double* loss_sum, uint64_t step,
                         device::Stream& compute);

  // Reduces once what each slot may hold, as Finish does, and drains nothing;
  // leaves undefined sums. Waits for the stream.
  absl::Status Rehearse();

  absl::Status Synchronize();

 private:
  struct Slot {
    float* sum = nullptr;
    uint64_t sum_elements = 0;
    bf16* drain = nullptr;
    std::unique_ptr<device::Event> computed, reduced, ready, drained;
  };
  // Elements from an accumulator's start.
  struct Range {
    uint64_t begin, end;
  };
  // What this rank drains of a bucket: [begin, end), at `data`.
  struct Share {
    uint64_t begin = 0, end = 0;
    const bf16* data = nullptr;
  };

  explicit Gradients(const Inputs& inputs) : in_(inputs) {}
  Slot& SlotOf(int unit);
  // All of the unit's accumulator but what products write.
  std::vector<Range> AddedRanges(int unit);
  // Zeroes on the reduce stream what `unit` adds to, and says that it may.
  absl::Status MakeReady(int unit);
  // The unit that takes the accumulator next, or one of the same shape.
  int Successor(int unit) const;
  // Its part of the sum, with this rank's norm of it.
  absl::StatusOr<Share> Reduce(size_t bucket, Slot& slot);
  absl::StatusOr<Share> Exchange(const policy::GradBucket& bucket, Slot& slot);
  absl::Status Drain(size_t bucket, uint64_t step, const Share& share,
                     Slot& slot);
  // Whether the unit is the embedding and only its used rows go down.
  bool drains_used_rows(int unit) const {
    return used_rows_ != nullptr && unit == in_.layout->embedding_unit();
  }
  // All ranks' used_rows of the step, to the device.
  absl::Status FetchUsedRows(uint64_t step);
  // From `values` to where the chunk lies in `grads`.
  absl::Status CopyUsedRows(const policy::GradChunk& chunk, const bf16* values,
                            bf16* out);
  // Until the daemon has consumed so many of this rank's chunks.
  absl::Status WaitForChunks(uint64_t freed, int unit, uint64_t step);

  Inputs in_;
  policy::GradSchedule schedule_;
  std::unique_ptr<device::Stream> reduce_, drain_;
  std::unique_ptr<device::Event> loss_computed_;
  std::vector<Slot> decoder_, ends_;
  std::vector<std::vector<Range>> added_;  // per unit
  double* norms_ = nullptr;                // per bucket, device memory
  // Device memory, [ranks][shm::RowWords]; null: all rows go down.
  uint64_t* used_rows_ = nullptr;
  // In the step's sequences; the chunks are this rank's.
  size_t next_bucket_ = 0, next_chunk_ = 0;
};

}  // namespace slidedp::step
