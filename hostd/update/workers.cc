#include "hostd/update/workers.h"

#include <algorithm>
#include <chrono>
#include <functional>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/units.h"
#include "hostd/update/gradients.h"

namespace slidedp::hostd {

UpdateWorkers::UpdateWorkers(HostState& state, const StepWork& work,
                             int threads)
    : state_(state),
      work_(work),
      deferred_(state.plan().update_mode == policy::UpdateMode::kDeferred),
      square_norms_(work.units.size()),
      pieces_left_(work.units.size()),
      sums_left_(work.units.size()),
      consumed_(work.piece_of.size()),
      prefix_(work.piece_of.size()),
      busy_ns_(threads) {
  for (size_t u = 0; u < work.units.size(); ++u) {
    if (!work.units[u].host_sums) continue;
    SDP_CHECK(!deferred_ || state.reduced(static_cast<int>(u), 0) != nullptr,
              "no plane for the sums of the ranks' gradients");
    square_norms_[u].resize(
        deferred_ ? CeilDiv(state.layout().units[u].count, kNormBlockElements)
                  : work.units[u].pieces);
  }
  for (int i = 0; i < threads; ++i) {
    threads_.emplace_back([this, i] { Run(i); });
  }
}

UpdateWorkers::~UpdateWorkers() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  work_ready_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void UpdateWorkers::BeginStep(uint64_t step) {
  std::lock_guard lock(mutex_);
  SDP_CHECK(queue_.empty() && running_ == 0, "a step overlaps the one before");
  step_ = step;
  progress_ = Progress();
  for (size_t u = 0; u < work_.units.size(); ++u) {
    pieces_left_[u] = sums_left_[u] = work_.units[u].pieces;
  }
  for (size_t r = 0; r < consumed_.size(); ++r) {
    consumed_[r].assign(work_.chunks(static_cast<int>(r)), false);
  }
  std::fill(busy_ns_.begin(), busy_ns_.end(), 0);
}

void UpdateWorkers::SetAdamW(const AdamWStep& adamw) {
  std::lock_guard lock(mutex_);
  SDP_CHECK(queue_.empty() && running_ == 0, "constants change under a task");
  adamw_ = adamw;
}

void UpdateWorkers::Push(std::span<const Task> tasks) {
  if (tasks.empty()) return;
  {
    std::lock_guard lock(mutex_);
    if (halted_ || !progress_.failure.ok()) return;
    for (const Task& task : tasks) queue_.push(task);
  }
  work_ready_.notify_all();
}

void UpdateWorkers::Skip(std::span<const int> pieces) {
  std::lock_guard lock(mutex_);
  if (halted_) return;
  for (int index : pieces) {
    const Piece& piece = work_.pieces[index];
    Consume(piece);
    CountDone(piece.unit);
  }
}

Progress UpdateWorkers::progress() const {
  std::lock_guard lock(mutex_);
  Progress now = progress_;
  now.tasks_left = queue_.size() + running_;
  now.busiest_ns = *std::max_element(busy_ns_.begin(), busy_ns_.end());
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
  std::unique_lock lock(mutex_);
  halted_ = true;
  queue_ = {};
  changed_.wait(lock, [&] { return running_ == 0; });
}

double UpdateWorkers::HostSquareNorm(int unit) const {
  std::lock_guard lock(mutex_);
  double sum = 0;
  for (double part : square_norms_[unit]) sum += part;
  return sum;
}

void UpdateWorkers::Run(int thread) {
  std::unique_lock lock(mutex_);
  while (true) {
    work_ready_.wait(lock, [&] { return ending_ || !queue_.empty(); });
    if (ending_) return;
    const Task task = queue_.top();
    queue_.pop();
    ++running_;
    lock.unlock();
    const int64_t begin_ns = MonotonicNs();
    absl::Status status = Execute(task);
    const int64_t busy_ns = MonotonicNs() - begin_ns;
    lock.lock();
    busy_ns_[thread] += busy_ns;
    --running_;
    if (status.ok()) {
      Finish(task);
    } else if (progress_.failure.ok()) {
      progress_.failure = std::move(status);
      queue_ = {};
    }
    ++changes_;
    changed_.notify_all();
  }
}

absl::Status UpdateWorkers::Execute(const Task& task) {
  switch (task.kind) {
    case TaskKind::kUpdate: {
      const Piece& piece = work_.pieces[task.index];
      const UnitWork& unit = work_.units[piece.unit];
      double* square_norm =
          unit.host_sums && !deferred_
              ? &square_norms_[piece.unit][task.index - unit.first_piece]
              : nullptr;
      return Update(piece, square_norm);
    }
    case TaskKind::kSum:
      Sum(work_.pieces[task.index]);
      break;
    case TaskKind::kNorm: {
      const uint64_t begin = task.index * kNormBlockElements;
      const uint64_t count = std::min(
          kNormBlockElements, state_.layout().units[task.unit].count - begin);
      square_norms_[task.unit][task.index] =
          SquareNorm(state_.reduced(task.unit, begin), count);
      break;
    }
  }
  return absl::OkStatus();
}

std::vector<const bf16*> UpdateWorkers::ChunksOf(const Piece& piece) const {
  std::vector<const bf16*> sources;
  for (const ChunkRef& chunk : piece.chunks) {
    sources.push_back(state_.grad_chunk(
        chunk.rank, step_ * work_.chunks(chunk.rank) + chunk.index));
  }
  return sources;
}

absl::Status UpdateWorkers::Update(const Piece& piece, double* square_norm) {
  std::vector<const bf16*> sources;
  if (FromReduced(piece)) {
    sources.push_back(state_.reduced(piece.unit, piece.begin));
  } else {
    sources = ChunksOf(piece);
  }
  if (square_norm != nullptr) *square_norm = 0;
  for (const model::Tensor& tensor :
       state_.layout().units[piece.unit].tensors) {
    const uint64_t begin = std::max(piece.begin, tensor.offset);
    const uint64_t end =
        std::min(piece.begin + piece.count, tensor.offset + tensor.count);
    if (begin >= end) continue;
    absl::Status status =
        UpdateSegment(piece, tensor, begin, end, sources, square_norm);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status UpdateWorkers::UpdateSegment(const Piece& piece,
                                          const model::Tensor& tensor,
                                          uint64_t begin, uint64_t end,
                                          std::span<const bf16* const> sources,
                                          double* square_norm) {
  bool finite = true;
  if (sources.size() == 1) {
    finite =
        AdamWUpdate(state_.planes(piece.unit, begin, end - begin),
                    sources[0] + (begin - piece.begin), tensor.decay, adamw_);
  } else {
    float sum[kSumElements];
    for (uint64_t at = begin; at < end && finite; at += kSumElements) {
      const uint64_t count = std::min(kSumElements, end - at);
      SumGradients(sources, at - piece.begin, count, sum);
      *square_norm += SquareNorm(sum, count);
      finite = AdamWUpdate(state_.planes(piece.unit, at, count), sum,
                           tensor.decay, adamw_);
    }
  }
  if (finite) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(DescribeUnit(state_.layout(), piece.unit), ", step ", step_,
                   ": ", tensor.name,
                   ": the update left the finite range; lower the learning "
                   "rate or start from the last checkpoint"));
}

void UpdateWorkers::Sum(const Piece& piece) {
  const std::vector<const bf16*> sources = ChunksOf(piece);
  bf16* reduced = state_.reduced(piece.unit, piece.begin);
  float sum[kSumElements];
  for (uint64_t at = 0; at < piece.count; at += kSumElements) {
    const uint64_t count = std::min(kSumElements, piece.count - at);
    SumGradients(sources, at, count, sum);
    for (uint64_t i = 0; i < count; ++i) {
      reduced[at + i] = FloatToBf16Even(sum[i]);
    }
  }
}

void UpdateWorkers::Finish(const Task& task) {
  if (!progress_.failure.ok()) return;
  switch (task.kind) {
    case TaskKind::kUpdate: {
      const Piece& piece = work_.pieces[task.index];
      if (!FromReduced(piece)) Consume(piece);
      CountDone(piece.unit);
      break;
    }
    case TaskKind::kSum:
      Consume(work_.pieces[task.index]);
      if (--sums_left_[task.unit] == 0 && !halted_) {
        for (uint64_t b = 0; b < square_norms_[task.unit].size(); ++b) {
          queue_.push({task.unit, TaskKind::kNorm, b});
        }
        work_ready_.notify_all();
      }
      break;
    case TaskKind::kNorm:
      break;
  }
}

void UpdateWorkers::Consume(const Piece& piece) {
  for (const ChunkRef& chunk : piece.chunks) {
    std::vector<bool>& consumed = consumed_[chunk.rank];
    consumed[chunk.index] = true;
    const uint64_t step_begin = step_ * consumed.size();
    uint64_t& prefix = prefix_[chunk.rank];
    const uint64_t before = prefix;
    while (prefix - step_begin < consumed.size() &&
           consumed[prefix - step_begin]) {
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
  if (--pieces_left_[unit] > 0) return;
  ++progress_.units_published;
  progress_.published_ns = MonotonicNs();
  // Release: the other threads' writes to the planes came before, through
  // mutex_.
  state_.versions().param_version(unit).store(step_ + 1,
                                              std::memory_order_release);
}

}  // namespace slidedp::hostd
