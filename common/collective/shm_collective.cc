// Every operation goes piece by piece through the staging buffers:
//
//   stage    each rank copies its part of the piece into its own buffer
//   arrive   and waits until all have
//   use      reads of all buffers
//   arrive   done with this buffer; nobody waits here, but before a buffer is
//            filled again all must have come this far
//
// All-reduce and reduce split the work of a piece: rank r sums slice r of all
// buffers into slice r of its own buffer, which nobody else reads before the
// arrival that follows, and the sums are collected from there.
#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "common/base/backoff.h"
#include "common/base/clock.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/collective/collective.h"
#include "common/collective/exchange.h"
#include "common/collective/exchange_layout.h"
#include "common/collective/operation.h"
#include "common/collective/sum.h"

namespace slidedp::collective {
namespace {

// One rank's side. Used by one stream thread at a time; what is enqueued holds
// it, so the Collective may go first.
class Rank {
 public:
  Rank(Exchange exchange, int rank, int world_size, int64_t deadline_ns)
      : exchange_(exchange),
        rank_(rank),
        world_size_(world_size),
        deadline_ns_(deadline_ns),
        inputs_(world_size) {}

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  // `number` counts the operations as enqueued.
  absl::Status Run(const Operation& operation, uint64_t number, char* data) {
    // Operations on several streams are fine if events order them; otherwise
    // the ranks' arrivals would lose their meaning.
    if (started_.fetch_add(1) != number) {
      return absl::FailedPreconditionError(
          "operations of one collective ran out of their order; order the "
          "streams that carry them by events");
    }
    // An error of this rank shows at the others as its missing arrival.
    if (!failed_.ok()) return failed_;
    failed_ = Annotate(Dispatch(operation, number, data),
                       Describe(operation.Packed(), operation.count));
    return failed_;
  }

 private:
  absl::Status Dispatch(const Operation& operation, uint64_t number,
                        char* data) {
    SDP_RETURN_IF_ERROR(Agree(operation, number));
    switch (operation.kind) {
      case OperationKind::kAllReduce:
        return Reduce(data, operation, true);
      case OperationKind::kReduce:
        return Reduce(data, operation, rank_ == operation.root);
      case OperationKind::kReduceScatter:
        return ReduceScatter(data, operation);
      case OperationKind::kAllGather:
        return AllGather(data, operation.count);
      case OperationKind::kBarrier:
        return absl::OkStatus();
    }
    return absl::InternalError("unknown operation");
  }

  // All ranks are here, and for the same thing.
  absl::Status Agree(const Operation& operation, uint64_t number) {
    OperationWords& mine = exchange_.words(rank_).operation[number % 2];
    mine.what.store(operation.Packed(), std::memory_order_relaxed);
    mine.count.store(operation.count, std::memory_order_relaxed);
    SDP_RETURN_IF_ERROR(ArriveAndWait());
    for (int other = 0; other < world_size_; ++other) {
      const OperationWords& theirs =
          exchange_.words(other).operation[number % 2];
      const uint64_t what = theirs.what.load(std::memory_order_relaxed);
      const uint64_t count = theirs.count.load(std::memory_order_relaxed);
      if (what == operation.Packed() && count == operation.count) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          "rank ", rank_, " is in operation ", number,
          " of this kind, but rank ", other, " is in ", Describe(what, count)));
    }
    return absl::OkStatus();
  }

  absl::Status Reduce(char* data, const Operation& operation, bool takes_sum) {
    const size_t element_bytes = DTypeBytes(operation.dtype);
    const size_t piece_count = exchange_.buffer_bytes() / element_bytes;
    for (size_t begin = 0; begin < operation.count; begin += piece_count) {
      const size_t count = std::min(piece_count, operation.count - begin);
      SDP_ASSIGN_OR_RETURN(const uint64_t buffer, AcquireBuffer());
      char* piece = data + begin * element_bytes;
      char* own = exchange_.staging(rank_, buffer);
      std::memcpy(own, piece, count * element_bytes);
      SDP_RETURN_IF_ERROR(ArriveAndWait());

      // Slices of whole cache lines; the last ones may be short or empty.
      const size_t slice_count =
          AlignUp(CeilDiv(count, world_size_), kCacheLineBytes / element_bytes);
      const auto slice = [&](int rank) {
        const size_t first = std::min(count, rank * slice_count);
        return std::pair(first * element_bytes,
                         std::min(slice_count, count - first));
      };
      const auto [own_offset, own_count] = slice(rank_);
      SumStaged(buffer, own_offset, operation.dtype, own_count,
                own + own_offset);
      SDP_RETURN_IF_ERROR(ArriveAndWait());

      for (int other = 0; takes_sum && other < world_size_; ++other) {
        const auto [offset, length] = slice(other);
        std::memcpy(piece + offset, exchange_.staging(other, buffer) + offset,
                    length * element_bytes);
      }
      ReleaseBuffer(buffer);
    }
    return absl::OkStatus();
  }

  absl::Status ReduceScatter(char* data, const Operation& operation) {
    const size_t element_bytes = DTypeBytes(operation.dtype);
    const size_t shard_bytes = operation.count * element_bytes;
    // One slice of each shard per piece.
    const size_t slice_bytes = exchange_.buffer_bytes() / world_size_ /
                               kCacheLineBytes * kCacheLineBytes;
    for (size_t begin = 0; begin < shard_bytes; begin += slice_bytes) {
      const size_t bytes = std::min(slice_bytes, shard_bytes - begin);
      SDP_ASSIGN_OR_RETURN(const uint64_t buffer, AcquireBuffer());
      char* own = exchange_.staging(rank_, buffer);
      for (int shard = 0; shard < world_size_; ++shard) {
        std::memcpy(own + shard * slice_bytes,
                    data + shard * shard_bytes + begin, bytes);
      }
      SDP_RETURN_IF_ERROR(ArriveAndWait());
      SumStaged(buffer, rank_ * slice_bytes, operation.dtype,
                bytes / element_bytes, data + rank_ * shard_bytes + begin);
      ReleaseBuffer(buffer);
    }
    return absl::OkStatus();
  }

  absl::Status AllGather(char* data, size_t shard_bytes) {
    const size_t piece_bytes = exchange_.buffer_bytes();
    for (size_t begin = 0; begin < shard_bytes; begin += piece_bytes) {
      const size_t bytes = std::min(piece_bytes, shard_bytes - begin);
      SDP_ASSIGN_OR_RETURN(const uint64_t buffer, AcquireBuffer());
      std::memcpy(exchange_.staging(rank_, buffer),
                  data + rank_ * shard_bytes + begin, bytes);
      SDP_RETURN_IF_ERROR(ArriveAndWait());
      for (int other = 0; other < world_size_; ++other) {
        if (other == rank_) continue;
        std::memcpy(data + other * shard_bytes + begin,
                    exchange_.staging(other, buffer), bytes);
      }
      ReleaseBuffer(buffer);
    }
    return absl::OkStatus();
  }

  void SumStaged(uint64_t buffer, size_t offset_bytes, DType dtype,
                 size_t count, void* out) {
    for (int other = 0; other < world_size_; ++other) {
      inputs_[other] = exchange_.staging(other, buffer) + offset_bytes;
    }
    SumInRankOrder(inputs_, dtype, count, out);
  }

  // The next buffer, once nobody reads it any more.
  absl::StatusOr<uint64_t> AcquireBuffer() {
    const uint64_t buffer = pieces_++ % 2;
    SDP_RETURN_IF_ERROR(AwaitAll(released_at_[buffer]));
    return buffer;
  }

  void ReleaseBuffer(uint64_t buffer) { released_at_[buffer] = Arrive(); }

  uint64_t Arrive() {
    exchange_.words(rank_).arrivals.store(++arrivals_,
                                          std::memory_order_release);
    return arrivals_;
  }

  absl::Status ArriveAndWait() { return AwaitAll(Arrive()); }

  absl::Status AwaitAll(uint64_t arrival) {
    Backoff backoff;
    int64_t begin_ns = 0;
    for (int other = 0; other < world_size_;) {
      if (Arrived(other, arrival)) {
        ++other;
        continue;
      }
      if (device::CpuStreamIsClosing()) {
        return absl::CancelledError("this rank leaves");
      }
      const int64_t now_ns = MonotonicNs();
      if (begin_ns == 0) begin_ns = now_ns;
      if (now_ns - begin_ns >= deadline_ns_) return Missing(arrival);
      backoff.Pause();
    }
    return absl::OkStatus();
  }

  bool Arrived(int other, uint64_t arrival) const {
    return exchange_.words(other).arrivals.load(std::memory_order_acquire) >=
           arrival;
  }

  absl::Status Missing(uint64_t arrival) const {
    std::string ranks;
    for (int other = 0; other < world_size_; ++other) {
      if (Arrived(other, arrival)) continue;
      absl::StrAppend(&ranks, ranks.empty() ? "" : ", ", other);
    }
    // The last one may have come just now; this rank's deadline is past all
    // the same, and the others will miss this rank.
    if (ranks.empty()) ranks = "none any more (too late)";
    return absl::DeadlineExceededError(absl::StrCat(
        "rank ", rank_, " waited ", FormatSeconds(deadline_ns_ * 1e-9),
        "; missing ranks: ", ranks));
  }

  const Exchange exchange_;
  const int rank_;
  const int world_size_;
  const int64_t deadline_ns_;

  std::atomic<uint64_t> started_{0};
  uint64_t arrivals_ = 0;
  uint64_t pieces_ = 0;
  std::array<uint64_t, 2> released_at_ = {0, 0};
  std::vector<const void*> inputs_;
  absl::Status failed_;
};

class ShmCollective : public Collective {
 public:
  explicit ShmCollective(std::shared_ptr<Rank> rank) : rank_(std::move(rank)) {}

  int rank() const override { return rank_->rank(); }
  int world_size() const override { return rank_->world_size(); }

  absl::Status AllReduce(void* data, size_t count, DType dtype,
                         device::Stream& stream) override {
    return Enqueue({OperationKind::kAllReduce, dtype, 0, count}, data, stream);
  }
  absl::Status Reduce(void* data, size_t count, DType dtype, int root,
                      device::Stream& stream) override {
    return Enqueue({OperationKind::kReduce, dtype, root, count}, data, stream);
  }
  absl::Status ReduceScatter(void* data, size_t shard_count, DType dtype,
                             device::Stream& stream) override {
    return Enqueue({OperationKind::kReduceScatter, dtype, 0, shard_count}, data,
                   stream);
  }
  absl::Status AllGather(void* data, size_t shard_bytes,
                         device::Stream& stream) override {
    return Enqueue({OperationKind::kAllGather, DType::kF32, 0, shard_bytes},
                   data, stream);
  }
  absl::Status Barrier(device::Stream& stream) override {
    return Enqueue({OperationKind::kBarrier}, nullptr, stream);
  }

 private:
  absl::Status Enqueue(const Operation& operation, void* data,
                       device::Stream& stream) {
    SDP_RETURN_IF_ERROR(CheckOperation(operation, data, world_size()));
    SDP_RETURN_IF_ERROR(device::EnqueueOnCpu(
        stream, [rank = rank_, operation, number = enqueued_,
                 data = static_cast<char*>(data)] {
          return rank->Run(operation, number, data);
        }));
    ++enqueued_;
    return absl::OkStatus();
  }

  const std::shared_ptr<Rank> rank_;
  uint64_t enqueued_ = 0;
};

absl::Status AgreeOnHeader(const Exchange& exchange, int world_size) {
  ExchangeHeader& header = exchange.header();
  const auto agree = [](std::atomic<uint64_t>& word, absl::string_view field,
                        uint64_t mine) {
    uint64_t found = 0;
    if (word.compare_exchange_strong(found, mine) || found == mine) {
      return absl::OkStatus();
    }
    return absl::FailedPreconditionError(absl::StrCat(
        "exchange segment: ", field, " is ", found, ", this rank has ", mine,
        "; all ranks must be of one job and one version"));
  };
  SDP_RETURN_IF_ERROR(agree(header.magic, "magic", kExchangeMagic));
  SDP_RETURN_IF_ERROR(
      agree(header.layout_version, "layout_version", kExchangeLayoutVersion));
  SDP_RETURN_IF_ERROR(agree(header.world_size, "world_size", world_size));
  return agree(header.staging_bytes, "staging_bytes", exchange.buffer_bytes());
}

}  // namespace

absl::StatusOr<std::unique_ptr<Collective>> NewShmCollective(
    device::Device& device, void* region, size_t region_bytes, int rank,
    int world_size, size_t staging_bytes_per_rank, int64_t deadline_ns) {
  if (device.kind() != device::Kind::kCpu) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ranks on ", device.description(), " can't meet in shared memory"));
  }
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank, " of ", world_size, " can't exist"));
  }
  if (deadline_ns <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a deadline of ", deadline_ns, " ns"));
  }
  const size_t needed = ExchangeBytes(world_size, staging_bytes_per_rank);
  if (region == nullptr || region_bytes < needed ||
      reinterpret_cast<uintptr_t>(region) % kCacheLineBytes != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "exchange segment: ", region_bytes, " bytes, but ", world_size,
        " ranks with ", staging_bytes_per_rank, " staging bytes need ", needed,
        ", starting on a cache line"));
  }
  Exchange exchange(region, world_size, staging_bytes_per_rank);
  SDP_RETURN_IF_ERROR(AgreeOnHeader(exchange, world_size));
  if (exchange.words(rank).arrivals.load(std::memory_order_acquire) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "exchange segment: rank ", rank,
        " took part already; a restarted job needs a new segment"));
  }
  return std::make_unique<ShmCollective>(
      std::make_shared<Rank>(exchange, rank, world_size, deadline_ns));
}

}  // namespace slidedp::collective
