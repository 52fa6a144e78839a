// The threads that write the planes, and the words that follow from what they
// finish: grad_free when chunks are consumed, param_version when a unit is
// done. Which task may run is the coordinator's decision (engine.cc).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <queue>
#include <span>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "hostd/store/host_state.h"
#include "hostd/update/adamw.h"
#include "hostd/update/step_work.h"

namespace slidedp::hostd {

enum class TaskKind {
  kUpdate,  // AdamW on a piece
  kSum,     // a piece's chunks into the `reduced` plane
  kNorm,    // one block of a reduced unit
};

// Lowest unit first: it is needed first by the next forward.
struct Task {
  int unit;
  TaskKind kind;
  uint64_t index;  // piece; kNorm: block

  bool operator>(const Task& other) const {
    return std::tie(unit, kind, index) >
           std::tie(other.unit, other.kind, other.index);
  }
};

// What the coordinator sees of a step.
struct Progress {
  absl::Status failure;  // of a task; nothing is published after one
  int units_published = 0;
  uint64_t tasks_left = 0;   // queued or running
  int64_t published_ns = 0;  // last publication
  int64_t busiest_ns = 0;    // work of the busiest thread
};

class UpdateWorkers {
 public:
  // Both are borrowed. Starts the threads.
  UpdateWorkers(HostState& state, const StepWork& work, int threads);
  ~UpdateWorkers();
  UpdateWorkers(const UpdateWorkers&) = delete;
  UpdateWorkers& operator=(const UpdateWorkers&) = delete;

  // The calls below are the coordinator's, from one thread.

  // All tasks of the step before are done.
  void BeginStep(uint64_t step);
  // For the kUpdate tasks pushed afterwards.
  void SetAdamW(const AdamWStep& adamw);
  void Push(std::span<const Task> tasks);
  // Consumes the pieces' chunks and counts the pieces as done, in this order,
  // without touching the planes.
  void Skip(std::span<const int> pieces);
  Progress progress() const;
  // Until a task finishes or Wake() is called, at most `ns`.
  Progress Wait(int64_t ns);
  // No task starts any more; returns when none runs.
  void Halt();

  // Sum of squares of a host-summed unit after its tasks are done.
  double HostSquareNorm(int unit) const;

  // From any thread: ends a Wait() early.
  void Wake();

 private:
  void Run(int thread);
  absl::Status Execute(const Task& task);
  absl::Status Update(const Piece& piece, double* square_norm);
  absl::Status UpdateSegment(const Piece& piece, const model::Tensor& tensor,
                             uint64_t begin, uint64_t end,
                             std::span<const bf16* const> sources,
                             double* square_norm);
  void Sum(const Piece& piece);
  std::vector<const bf16*> ChunksOf(const Piece& piece) const;
  // The piece is updated from `reduced`; its chunks were consumed by kSum.
  bool FromReduced(const Piece& piece) const {
    return deferred_ && work_.units[piece.unit].host_sums;
  }

  // These hold mutex_.
  void Finish(const Task& task);
  void Consume(const Piece& piece);
  void CountDone(int unit);

  HostState& state_;
  const StepWork& work_;
  const bool deferred_;

  // Written by the coordinator while no task runs.
  uint64_t step_ = 0;
  AdamWStep adamw_ = {};

  // Per unit: partial square norms, each written by the task that owns it.
  std::vector<std::vector<double>> square_norms_;

  mutable std::mutex mutex_;
  std::condition_variable work_ready_, changed_;
  // All below: guarded by mutex_.
  std::priority_queue<Task, std::vector<Task>, std::greater<Task>> queue_;
  int running_ = 0;
  bool halted_ = false, ending_ = false, woken_ = false;
  uint64_t changes_ = 0;  // tasks finished, ever
  Progress progress_;
  std::vector<int> pieces_left_, sums_left_;  // per unit
  // Per rank: chunks of this step that were consumed, and the prefix over all
  // steps, which is what grad_free says.
  std::vector<std::vector<bool>> consumed_;
  std::vector<uint64_t> prefix_;
  std::vector<int64_t> busy_ns_;  // per thread

  std::vector<std::thread> threads_;
};

}  // namespace slidedp::hostd
