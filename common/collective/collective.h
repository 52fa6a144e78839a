// Exchange among the ranks of a job. Every rank calls the same operations in
// the same order on one Collective, or all wait until the deadline and fail.
// Operations are enqueued on `stream` and run in its order; buffers are
// borrowed until the stream passes. Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "common/collective/exchange.h"
#include "common/device/device.h"

namespace slidedp::collective {

enum class DType { kF32, kBf16 };  // kBf16 sums in float32, rounds once (even)

inline size_t DTypeBytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

// Sums are taken in rank order 0, 1, ... R-1, whatever the operation, so
// AllReduce, Reduce and ReduceScatter of the same inputs agree bit for bit on
// the shared-memory implementation.
class Collective {
 public:
  virtual ~Collective() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  // In place over `count` elements.
  virtual absl::Status AllReduce(void* data, size_t count, DType dtype,
                                 device::Stream& stream) = 0;
  // The sum lands in `data` of `root`; other ranks' `data` is unchanged.
  virtual absl::Status Reduce(void* data, size_t count, DType dtype, int root,
                              device::Stream& stream) = 0;
  // `data` holds world_size() shards of `shard_count`; the sum of shard rank()
  // replaces that shard of `data` in place; the other shards are then
  // undefined.
  virtual absl::Status ReduceScatter(void* data, size_t shard_count,
                                     DType dtype, device::Stream& stream) = 0;
  // Shard rank() of `data` (world_size() shards of `shard_bytes`) is sent, the
  // others are filled in.
  virtual absl::Status AllGather(void* data, size_t shard_bytes,
                                 device::Stream& stream) = 0;
  virtual absl::Status Barrier(device::Stream& stream) = 0;
};

// Shared-memory implementation for CPU ranks, over the job's `exchange`
// segment. `region` is ExchangeBytes() long, zero at first use, and the same
// memory in all ranks. A rank that does not arrive within `deadline_ns` fails
// the operation with DeadlineExceeded naming the missing ranks.
absl::StatusOr<std::unique_ptr<Collective>> NewShmCollective(
    device::Device& device, void* region, size_t region_bytes, int rank,
    int world_size, size_t staging_bytes_per_rank, int64_t deadline_ns);
// World size 1: every operation is the identity.
std::unique_ptr<Collective> NewSoloCollective(device::Device& device);

}  // namespace slidedp::collective
