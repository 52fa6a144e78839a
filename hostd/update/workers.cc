#include "hostd/update/workers.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "common/base/check.h"
#include "common/base/clock.h"
#include "hostd/update/gradients.h"

namespace slidedp::hostd {
UpdateWorkers::UpdateWorkers(HostState& state, const StepWork& work,
                             int threads, uint64_t first_step,
                             trace::Recorder* recorder)
    : state_(state),
      work_(work),
      eager_(state.plan().update_mode == policy::UpdateMode::kEager),
      slices_(state, work),
      all_pieces_(work.pieces.size()),
      piece_slices_left_(work.pieces.size()),
      row_slices_left_(work.pieces.size()),
      piece_begin_ns_(work.pieces.size()),
      row_begin_ns_(work.pieces.size()),
      recorder_(recorder),
      left_(work.units.size()),
      sums_left_(work.units.size()),
      norms_left_(work.units.size()),
      updated_(work.pieces.size()),
      rows_updated_(work.pieces.size()),
      consumed_(work.piece_of.size()),
      prefix_(work.piece_of.size()),
      fence_(UnitsThatChange(work),
             [this](const Task& task) { PushPiece(task); }) {
  // Nobody else writes these words before the ranks begin.
  for (size_t u = 0; u < work.units.size(); ++u) {
    state.versions().param_version(u).store(first_step,
                                            std::memory_order_release);
  }
  for (size_t r = 0; r < work.piece_of.size(); ++r) {
    prefix_[r] = first_step * work.chunks(static_cast<int>(r));
    state.versions().grad_free(r).store(prefix_[r], std::memory_order_release);
    state.reports().grad_ready(r).store(prefix_[r], std::memory_order_release);
  }
  std::iota(all_pieces_.begin(), all_pieces_.end(), 0);
  const UnitWork& embedding = work.units[state.layout().embedding_unit()];
  for (int i = 0; i < embedding.pieces; ++i) {
    embedding_pieces_.push_back(embedding.first_piece + i);
  }
  // One per node may be more than `threads`.
  busy_ = std::vector<Busy>(std::max(threads, state.placement().node_count()));
  pools_ = std::make_unique<NodePools>(
      state.placement(), threads,
      [this](const Task& task, uint64_t slice, int thread) {
        RunSlice(task, slice, thread);
      });
}

void UpdateWorkers::BeginStep(uint64_t step, const AdamWStep& early) {
  std::lock_guard lock(mutex_);
  step_ = step;
  held_ = !eager_;
  slices_.BeginStep(step, early);
  progress_ = Progress();
  for (size_t u = 0; u < work_.units.size(); ++u) {
    left_[u] = sums_left_[u] = work_.units[u].pieces;
    norms_left_[u] = slices_.norm_blocks(static_cast<int>(u));
  }
  std::fill(updated_.begin(), updated_.end(), 0);
  std::fill(rows_updated_.begin(), rows_updated_.end(), 0);
  for (size_t r = 0; r < consumed_.size(); ++r) {
    consumed_[r].assign(work_.chunks(static_cast<int>(r)), 0);
  }
  for (Busy& busy : busy_) busy.ns.store(0, std::memory_order_relaxed);
}

void UpdateWorkers::UpdateOtherRows(std::vector<uint64_t> used_rows) {
  slices_.SetUsedRows(std::move(used_rows));
  {
    std::lock_guard lock(mutex_);
    left_[state_.layout().embedding_unit()] += embedding_pieces_.size();
  }
  PushPieces(TaskKind::kRows, embedding_pieces_);
}

void UpdateWorkers::Sum(std::span<const int> pieces) {
  PushPieces(TaskKind::kSum, pieces);
}

void UpdateWorkers::Update(std::span<const int> pieces) {
  for (int piece : pieces) slices_.MarkEarly(piece);
  PushPieces(TaskKind::kUpdate, pieces);
}

void UpdateWorkers::PushPieces(TaskKind kind, std::span<const int> pieces) {
  for (int index : pieces) {
    const Piece& piece = work_.pieces[index];
    const Task task = {piece.unit, kind, static_cast<uint64_t>(index),
                       kind == TaskKind::kRows ? kLastTurn : piece.turn};
    // Sums leave the planes alone.
    if (kind == TaskKind::kSum) {
      PushPiece(task);
    } else {
      fence_.Pass(task);
    }
  }
}

void UpdateWorkers::PushPiece(const Task& task) {
  const Piece& piece = work_.pieces[task.index];
  slices_left(task).store(piece.slices, std::memory_order_relaxed);
  begin_ns(task).store(0, std::memory_order_relaxed);
  const Placement& placement = state_.placement();
  const auto node_of = [&](uint64_t slice) {
    return placement.NodeOf(piece.unit,
                            piece.begin + slice * work_.slice_elements);
  };
  for (uint64_t first = 0; first < piece.slices;) {
    const int node = node_of(first);
    uint64_t end = first + 1;
    while (end < piece.slices && node_of(end) == node) ++end;
    pools_->Push(node, task, first, end);
    first = end;
  }
}

std::atomic<uint64_t>& UpdateWorkers::slices_left(const Task& task) {
  const bool rows =
      task.kind == TaskKind::kRows || task.kind == TaskKind::kUndoRows;
  return (rows ? row_slices_left_ : piece_slices_left_)[task.index];
}

std::atomic<int64_t>& UpdateWorkers::begin_ns(const Task& task) {
  const bool rows =
      task.kind == TaskKind::kRows || task.kind == TaskKind::kUndoRows;
  return (rows ? row_begin_ns_ : piece_begin_ns_)[task.index];
}

void UpdateWorkers::NoteBegin(const Task& task, int64_t now_ns) {
  if (task.kind == TaskKind::kNorm) return;  // one slice
  std::atomic<int64_t>& begin = begin_ns(task);
  int64_t none = 0;
  if (begin.load(std::memory_order_relaxed) == 0) {
    begin.compare_exchange_strong(none, now_ns, std::memory_order_relaxed);
  }
}

void UpdateWorkers::Record(const Task& task, int64_t slice_begin_ns) {
  const bool norm = task.kind == TaskKind::kNorm;
  recorder_->Add(
      {trace::Lane::kUpdate, TaskName(task.kind), task.unit,
       static_cast<int32_t>(
           norm ? task.index : task.index - work_.units[task.unit].first_piece),
       step_,
       norm ? slice_begin_ns : begin_ns(task).load(std::memory_order_relaxed),
       MonotonicNs()});
}

void UpdateWorkers::Skip(std::span<const int> pieces) {
  std::lock_guard lock(mutex_);
  if (halted_) return;
  for (int piece : pieces) FinishPiece(piece);
}

void UpdateWorkers::Decide(std::optional<float> clip_coefficient) {
  std::vector<int> early, late;
  for (int piece : all_pieces_) {
    (slices_.early(piece) ? early : late).push_back(piece);
  }
  slices_.Decide(clip_coefficient);
  if (early.empty() ? clip_coefficient.has_value() : clip_coefficient == 1.0f) {
    // What was updated stands, and what is queued goes on.
    {
      std::lock_guard lock(mutex_);
      held_ = false;
      if (!progress_.failure.ok()) return;
      PublishFrozenLocked();
      for (int piece : all_pieces_) {
        if (rows_updated_[piece]) CountDone(work_.pieces[piece].unit);
        if (updated_[piece]) FinishPiece(piece);
      }
    }
    return PushPieces(TaskKind::kFinal, late);
  }
  // Slices know what was done to them; so tasks may be cut short.
  fence_.Drop([this] { pools_->Drain(); });
  std::vector<int> rows_left;
  {
    std::lock_guard lock(mutex_);
    held_ = false;
    if (!progress_.failure.ok()) return;
    PublishFrozenLocked();
    if (slices_.rows_apart()) {
      for (int piece : embedding_pieces_) {
        if (clip_coefficient.has_value() && rows_updated_[piece]) {
          CountDone(work_.pieces[piece].unit);
        } else {
          rows_left.push_back(piece);
        }
      }
    }
    if (!clip_coefficient.has_value()) {
      for (int piece : late) FinishPiece(piece);
    }
  }
  PushPieces(
      clip_coefficient.has_value() ? TaskKind::kRows : TaskKind::kUndoRows,
      rows_left);
  PushPieces(TaskKind::kFinal, early);
  if (clip_coefficient.has_value()) PushPieces(TaskKind::kFinal, late);
}

Progress UpdateWorkers::progress() const {
  std::lock_guard lock(mutex_);
  Progress now = progress_;
  for (const Busy& busy : busy_) {
    now.busiest_ns =
        std::max(now.busiest_ns, busy.ns.load(std::memory_order_relaxed));
  }
  return now;
}

Progress UpdateWorkers::Wait(int64_t ns) {
  {
    std::unique_lock lock(mutex_);
    const uint64_t changes = changes_;
    changed_.wait_for(lock, std::chrono::nanoseconds(ns),
                      [&] { return woken_ || changes_ != changes; });
    woken_ = false;
  }
  return progress();
}

void UpdateWorkers::Wake() {
  {
    std::lock_guard lock(mutex_);
    woken_ = true;
  }
  changed_.notify_all();
}

void UpdateWorkers::Halt() {
  {
    std::lock_guard lock(mutex_);
    halted_ = true;
  }
  pools_->Close();
  pools_->Drain();
}

std::optional<double> UpdateWorkers::HostSquareNorm(int unit) const {
  std::lock_guard lock(mutex_);
  if (eager_ ? left_[unit] > 0 : norms_left_[unit] > 0) return std::nullopt;
  return slices_.HostSquareNorm(unit);
}

void UpdateWorkers::RunSlice(const Task& task, uint64_t slice, int thread) {
  const int64_t now_ns = MonotonicNs();
  if (recorder_ != nullptr) NoteBegin(task, now_ns);
  absl::Status status = Execute(task, slice);
  busy_[thread].ns.fetch_add(MonotonicNs() - now_ns, std::memory_order_relaxed);
  if (!status.ok()) {
    std::lock_guard lock(mutex_);
    return Fail(std::move(status));
  }
  // All slices' writes are seen by whoever finishes the task.
  if (task.kind != TaskKind::kNorm &&
      slices_left(task).fetch_sub(1, std::memory_order_acq_rel) > 1) {
    return;
  }
  if (recorder_ != nullptr) Record(task, now_ns);
  std::lock_guard lock(mutex_);
  Finish(task);
}

absl::Status UpdateWorkers::Execute(const Task& task, uint64_t slice) {
  if (task.kind == TaskKind::kNorm) {
    slices_.Norm(task.unit, task.index);
    return absl::OkStatus();
  }
  const Piece& piece = work_.pieces[task.index];
  switch (task.kind) {
    case TaskKind::kSum:
      slices_.Sum(piece, slice);
      return absl::OkStatus();
    case TaskKind::kUpdate:
      return slices_.Early(piece, slice);
    case TaskKind::kFinal:
      return slices_.Final(piece, slice);
    case TaskKind::kRows:
      return slices_.Rows(piece, slice);
    case TaskKind::kUndoRows:
      return slices_.UndoRows(piece, slice);
    case TaskKind::kNorm:
      break;
  }
  SDP_CHECK(false, "task kind");
}

void UpdateWorkers::Fail(absl::Status status) {
  if (!progress_.failure.ok()) return;
  progress_.failure = std::move(status);
  pools_->Close();
  Change();
}

void UpdateWorkers::Finish(const Task& task) {
  if (!progress_.failure.ok()) return;
  switch (task.kind) {
    case TaskKind::kSum:
      Consume(work_.pieces[task.index]);
      if (--sums_left_[task.unit] > 0 || halted_) return;
      for (uint64_t b = 0; b < slices_.norm_blocks(task.unit); ++b) {
        pools_->Push(
            state_.placement().NodeOf(task.unit, b * kNormBlockElements),
            {task.unit, TaskKind::kNorm, b}, 0, 1);
      }
      return;
    case TaskKind::kNorm:
      if (--norms_left_[task.unit] > 0) return;
      ++progress_.units_summed;
      return Change();
    case TaskKind::kUpdate:
      if (!held_) return FinishPiece(static_cast<int>(task.index));
      updated_[task.index] = true;
      return;
    case TaskKind::kRows:
      if (!held_) return CountDone(task.unit);
      rows_updated_[task.index] = true;
      return;
    case TaskKind::kUndoRows:
      return CountDone(task.unit);
    case TaskKind::kFinal:
      return FinishPiece(static_cast<int>(task.index));
  }
}

void UpdateWorkers::FinishPiece(int index) {
  const Piece& piece = work_.pieces[index];
  // Once more where kSum did it. It did not if the step is skipped, as that can
  // be known before all is summed.
  Consume(piece);
  CountDone(piece.unit);
}

void UpdateWorkers::Consume(const Piece& piece) {
  const policy::GradSchedule& schedule = state_.grad_schedule();
  for (const ChunkRef& chunk : piece.chunks) {
    std::vector<char>& consumed = consumed_[chunk.rank];
    consumed[chunk.index] = true;
    const uint64_t step_begin = step_ * consumed.size();
    uint64_t& prefix = prefix_[chunk.rank];
    const uint64_t before = prefix;
    while (prefix - step_begin < consumed.size() &&
           (prefix - step_begin < schedule.own[chunk.rank] ||
            consumed[prefix - step_begin])) {
      ++prefix;
    }
    // Release: the chunks' values were read before.
    if (prefix != before) {
      state_.versions()
          .grad_free(chunk.rank)
          .store(prefix, std::memory_order_release);
    }
  }
}

void UpdateWorkers::CountDone(int unit) {
  if (--left_[unit] == 0) Publish(unit);
}

void UpdateWorkers::PublishFrozen() {
  std::lock_guard lock(mutex_);
  PublishFrozenLocked();
}

void UpdateWorkers::PublishFrozenLocked() {
  if (halted_ || !progress_.failure.ok()) return;
  for (size_t u = 0; u < work_.units.size(); ++u) {
    if (work_.units[u].pieces == 0) Publish(static_cast<int>(u));
  }
}

void UpdateWorkers::Publish(int unit) {
  ++progress_.units_published;
  progress_.published_ns = MonotonicNs();
  // Release: the other threads' writes to the planes came before, through
  // mutex_ and the counts of slices.
  state_.versions().param_version(unit).store(step_ + 1,
                                              std::memory_order_release);
  Change();
}

void UpdateWorkers::Change() {
  ++changes_;
  changed_.notify_all();
}

}  // namespace slidedp::hostd
