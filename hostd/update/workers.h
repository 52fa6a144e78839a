// The tasks of a step, and the words that follow from what is finished:
// grad_free when chunks are consumed, param_version when a unit is done. Which
// task may run is the coordinator's decision (engine.cc).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "common/trace/trace.h"
#include "hostd/store/host_state.h"
#include "hostd/update/node_pools.h"
#include "hostd/update/save_fence.h"
#include "hostd/update/slice_updates.h"
#include "hostd/update/step_work.h"

namespace slidedp::hostd {

// What the coordinator sees of a step.
struct Progress {
  absl::Status failure;  // of a task; nothing is published after one
  int units_published = 0;
  int units_summed = 0;      // host-summed units whose norm is known
  int64_t published_ns = 0;  // last publication
  int64_t busiest_ns = 0;    // work of the busiest thread
};

class UpdateWorkers {
 public:
  // Both are borrowed. Starts the threads.
  // `recorder` (UpdateConfig) may be null. Steps before `first_step` are done:
  // the words say so from here on.
  UpdateWorkers(HostState& state, const StepWork& work, int threads,
                uint64_t first_step = 0, trace::Recorder* recorder = nullptr);
  // All calls but Wake() are the coordinator's, from one thread.

  // All units of the step before are published. `early`: its constants with
  // c = 1. Unless the mode is eager, nothing is consumed or published before
  // Decide().
  void BeginStep(uint64_t step, const AdamWStep& early);
  // No rank reads the embedding unit any more in this step, and only these
  // rows of its table will have gradients: begins to update the others. At
  // most once, before any piece of that unit is pushed.
  void UpdateOtherRows(std::vector<uint64_t> used_rows);
  // Host-summed units: complete pieces.
  void Sum(std::span<const int> pieces);
  // Publishes the units that have no pieces: nothing of this step keeps them
  // from the next one. In eager mode once the losses are known; otherwise
  // Decide() does it.
  void PublishFrozen();
  // Updates complete pieces with c = 1.
  void Update(std::span<const int> pieces);
  // Consumes the pieces' chunks and counts the pieces as done, in this order,
  // without touching the planes.
  void Skip(std::span<const int> pieces);
  // Not in eager mode, when all chunks are there and summed: finishes the step
  // with this clip coefficient. Nothing: the planes go back to what they were
  // (to rounding, where something was updated), and the step is skipped.
  void Decide(std::optional<float> clip_coefficient);

  Progress progress() const;
  // Until something of Progress changes or Wake() is called, at most `ns`.
  Progress Wait(int64_t ns);
  // No task starts any more; returns when none runs.
  void Halt();
  // Sum of squares of a host-summed unit; nothing while it isn't known (eager
  // mode: before the unit is published).
  std::optional<double> HostSquareNorm(int unit) const;

  // Between two steps: no unit changes before Release(unit).
  void HoldUnits() { fence_.Hold(); }
  bool holds_units() const { return fence_.holds_any(); }

  // From any thread: ends a Wait() early.
  void Wake();
  // From any thread.
  void Release(int unit) { fence_.Release(unit); }

 private:
  struct alignas(kCacheLineBytes) Busy {
    std::atomic<int64_t> ns = 0;
  };

  void RunSlice(const Task& task, uint64_t slice, int thread);
  absl::Status Execute(const Task& task, uint64_t slice);
  void PushPieces(TaskKind kind, std::span<const int> pieces);
  void PushPiece(const Task& task);
  void NoteBegin(const Task& task, int64_t begin_ns);
  void Record(const Task& task, int64_t begin_ns);
  // Slices of the task that are not finished.
  std::atomic<uint64_t>& slices_left(const Task& task);
  std::atomic<int64_t>& begin_ns(const Task& task);

  // These hold mutex_.
  void Fail(absl::Status status);
  void Finish(const Task& task);
  void FinishPiece(int piece);
  void Consume(const Piece& piece);
  void CountDone(int unit);
  void Publish(int unit);
  void PublishFrozenLocked();
  void Change();

  HostState& state_;
  const StepWork& work_;
  const bool eager_;
  SliceUpdates slices_;
  uint64_t step_ = 0;  // written while no task runs
  std::vector<int> embedding_pieces_, all_pieces_;

  // Per piece: of its task, and of its kRows or kUndoRows.
  std::vector<std::atomic<uint64_t>> piece_slices_left_, row_slices_left_;
  // The same for when the first of a task's slices began; 0: none has.
  std::vector<std::atomic<int64_t>> piece_begin_ns_, row_begin_ns_;
  trace::Recorder* const recorder_;
  std::vector<Busy> busy_;  // per thread

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // All below: guarded by mutex_.
  bool held_ = false;  // nothing is consumed or published
  bool halted_ = false, woken_ = false;
  uint64_t changes_ = 0;
  Progress progress_;
  // Per unit: pieces to be done, the table's other rows counting apart; pieces
  // to be summed; blocks to be normed.
  std::vector<uint64_t> left_, sums_left_, norms_left_;
  // Per piece, while held: kUpdate and kRows are finished.
  std::vector<char> updated_, rows_updated_;
  // Per rank: chunks of this step that were consumed, and the prefix over all
  // steps, which is what grad_free says. Chunks with slots of their own don't
  // hold it up: nobody waits for them.
  std::vector<std::vector<char>> consumed_;
  std::vector<uint64_t> prefix_;

  SaveFence fence_;
  std::unique_ptr<NodePools> pools_;  // ends before what its threads use
};

}  // namespace slidedp::hostd
