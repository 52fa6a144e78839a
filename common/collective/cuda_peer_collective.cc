#include "common/collective/cuda_peer_collective.h"

#include <cuda_runtime_api.h>
#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/collective/cuda_operation_watch.h"
#include "common/collective/cuda_peer_memory.h"
#include "common/collective/cuda_peer_sum.h"
#include "common/collective/operation.h"
#include "common/device/cuda_status.h"
#include "common/device/cuda_stream.h"

namespace slidedp::collective {
namespace {

constexpr int64_t kLeaveDeadlineNs = int64_t{10} * 1'000'000'000;

bool ForbiddenByUser() {
  const char* value = std::getenv("NCCL_P2P_DISABLE");
  return value != nullptr && std::strcmp(value, "0") != 0 && *value != '\0';
}

// Pieces are numbered over all operations, alike on every rank. A rank pushes
// one piece ahead of the one that it consumes.
class PeerCollectiveImpl : public PeerCollective {
 public:
  PeerCollectiveImpl(device::Device& device,
                     std::shared_ptr<device::CudaContext> context,
                     std::unique_ptr<PeerMemory> memory,
                     std::unique_ptr<NcclCollective> nccl, int64_t deadline_ns)
      : device_(device),
        context_(std::move(context)),
        nccl_(std::move(nccl)),
        memory_(std::move(memory)),
        watch_(deadline_ns) {}

  ~PeerCollectiveImpl() override {
    const absl::Status status = Leave();
    if (!status.ok()) {
      spdlog::warn("rank {}: leaving the other GPUs' memory: {}", rank(),
                   std::string(status.message()));
    }
  }

  absl::Status Create() {
    SDP_RETURN_IF_ERROR(watch_.Create());
    SDP_RETURN_IF_ERROR(PreparePeerSum());
    // More than one piece.
    const size_t shard_bytes = memory_->piece_bytes() + 1024;
    SDP_ASSIGN_OR_RETURN(auto stream, device_.NewStream("peers warm-up"));
    SDP_ASSIGN_OR_RETURN(
        const device::Buffer scratch,
        device_.Allocate("peers warm-up", shard_bytes * world_size(),
                         device::Memory::kDevice));
    SDP_RETURN_IF_ERROR(AllGather(scratch.data(), shard_bytes, *stream));
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      SDP_RETURN_IF_ERROR(ReduceScatter(
          scratch.data(), shard_bytes / DTypeBytes(dtype), dtype, *stream));
    }
    return AwaitStream(*stream);
  }

  int rank() const override { return nccl_->rank(); }
  int world_size() const override { return nccl_->world_size(); }

  absl::Status AllReduce(void* data, size_t count, DType dtype,
                         device::Stream& stream) override {
    return nccl_->AllReduce(data, count, dtype, stream);
  }
  absl::Status Reduce(void* data, size_t count, DType dtype, int root,
                      device::Stream& stream) override {
    return nccl_->Reduce(data, count, dtype, root, stream);
  }
  absl::Status Barrier(device::Stream& stream) override {
    return nccl_->Barrier(stream);
  }

  absl::Status ReduceScatter(void* data, size_t shard_count, DType dtype,
                             device::Stream& stream) override {
    const size_t shard_bytes = shard_count * DTypeBytes(dtype);
    return Exchange(
        {OperationKind::kReduceScatter, dtype, 0, shard_count}, data,
        shard_bytes, stream,
        // To each its own shard of our data.
        [&](int to) { return Shard(data, to, shard_bytes); },
        [&](uint64_t number, size_t offset, size_t bytes, cudaStream_t handle) {
          const int first = rank() == 0 ? 1 : 0;
          return LaunchPeerSum(Shard(data, rank(), shard_bytes) + offset,
                               bytes / DTypeBytes(dtype), dtype,
                               {memory_->Piece(rank(), first, number),
                                memory_->piece_bytes(), world_size(), rank()},
                               handle);
        });
  }

  absl::Status AllGather(void* data, size_t shard_bytes,
                         device::Stream& stream) override {
    return Exchange(
        {OperationKind::kAllGather, DType::kF32, 0, shard_bytes}, data,
        shard_bytes, stream,
        [&](int) { return Shard(data, rank(), shard_bytes); },
        [&](uint64_t number, size_t offset, size_t bytes,
            cudaStream_t handle) -> absl::Status {
          for (int from = 0; from < world_size(); ++from) {
            if (from == rank()) continue;
            SDP_RETURN_IF_CUDA_ERROR(
                cudaMemcpyAsync(Shard(data, from, shard_bytes) + offset,
                                memory_->Piece(rank(), from, number), bytes,
                                cudaMemcpyDeviceToDevice, handle));
          }
          return absl::OkStatus();
        });
  }

  absl::Status Check() override {
    SDP_RETURN_IF_ERROR(nccl_->Check());
    return Named(watch_.Check());
  }

 private:
  absl::Status Named(const absl::Status& status) const {
    return Annotate(status, absl::StrCat("rank ", rank()));
  }

  static char* Shard(void* data, int rank, size_t shard_bytes) {
    return static_cast<char*>(data) + rank * shard_bytes;
  }

  // The other ranks, beginning with the next one, so that not all push to one.
  int Other(int i) const { return (rank() + 1 + i) % world_size(); }

  // `source(to)` is what goes to a rank, `shard_bytes` long; `consume` takes
  // what came, piece by piece.
  template <typename Source, typename Consume>
  absl::Status Exchange(const Operation& operation, void* data,
                        size_t shard_bytes, device::Stream& stream,
                        const Source& source, const Consume& consume) {
    SDP_RETURN_IF_ERROR(CheckOperation(operation, data, world_size()));
    SDP_ASSIGN_OR_RETURN(cudaStream_t handle, device::UseCudaStream(stream));
    if (shard_bytes == 0) return absl::OkStatus();
    std::lock_guard<std::mutex> lock(mutex_);
    SDP_RETURN_IF_ERROR(Named(watch_.Begin(operation, handle)));
    const size_t piece = memory_->piece_bytes();
    const uint64_t pieces = CeilDiv(shard_bytes, piece);
    const auto size = [&](uint64_t i) {
      return std::min(piece, shard_bytes - i * piece);
    };
    SDP_RETURN_IF_ERROR(Push(source, 0, size(0), handle));
    for (uint64_t i = 0; i < pieces; ++i) {
      if (i + 1 < pieces) {
        SDP_RETURN_IF_ERROR(Push(source, (i + 1) * piece, size(i + 1), handle));
      }
      for (int o = 0; o < world_size() - 1; ++o) {
        SDP_RETURN_IF_ERROR(WaitWord(memory_->PushedWord(rank(), Other(o)),
                                     consumed_ + 1, handle));
      }
      SDP_RETURN_IF_ERROR(consume(consumed_, i * piece, size(i), handle));
      ++consumed_;
      for (int o = 0; o < world_size() - 1; ++o) {
        SDP_RETURN_IF_ERROR(WriteWord(memory_->ConsumedWord(Other(o), rank()),
                                      consumed_, handle));
      }
    }
    return Named(watch_.End(handle));
  }

  template <typename Source>
  absl::Status Push(const Source& source, size_t offset, size_t bytes,
                    cudaStream_t handle) {
    for (int o = 0; o < world_size() - 1; ++o) {
      const int to = Other(o);
      // The piece before the last one has left the place.
      if (pushed_ >= 2) {
        SDP_RETURN_IF_ERROR(
            WaitWord(memory_->ConsumedWord(rank(), to), pushed_ - 1, handle));
      }
      SDP_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(
          memory_->Piece(to, rank(), pushed_), source(to) + offset, bytes,
          cudaMemcpyDeviceToDevice, handle));
      SDP_RETURN_IF_ERROR(
          WriteWord(memory_->PushedWord(to, rank()), pushed_ + 1, handle));
    }
    ++pushed_;
    return absl::OkStatus();
  }

  absl::Status WaitWord(CUdeviceptr word, uint64_t at_least,
                        cudaStream_t handle) const {
    return device::CudaStatus(
        context_->driver.stream_wait_value64(handle, word, at_least,
                                             CU_STREAM_WAIT_VALUE_GEQ),
        "cuStreamWaitValue64");
  }
  // After everything before it in the stream, for all GPUs.
  absl::Status WriteWord(CUdeviceptr word, uint64_t value,
                         cudaStream_t handle) const {
    return device::CudaStatus(
        context_->driver.stream_write_value64(handle, word, value,
                                              CU_STREAM_WRITE_VALUE_DEFAULT),
        "cuStreamWriteValue64");
  }

  absl::Status AwaitStream(device::Stream& stream) {
    SDP_ASSIGN_OR_RETURN(cudaStream_t handle, device::UseCudaStream(stream));
    while (true) {
      const cudaError_t state = cudaStreamQuery(handle);
      if (state != cudaErrorNotReady) {
        return device::CudaStatus(state, "cudaStreamQuery");
      }
      cudaGetLastError();
      SDP_RETURN_IF_ERROR(Check());
      const timespec pause = {0, 100'000};
      nanosleep(&pause, nullptr);
    }
  }

  // Nobody unmaps what another still writes, nobody frees what is still mapped.
  absl::Status Leave() {
    SDP_RETURN_IF_ERROR(context_->Use());
    if (context_->abandoned.load()) {
      // Freed with the process: a stream may still use it.
      static_cast<void>(memory_.release());
      return absl::CancelledError("a stream was given up");
    }
    absl::Status status = Meet();
    if (!status.ok()) {
      static_cast<void>(memory_.release());
      return status;
    }
    memory_->Unmap();
    return Meet();
  }

  absl::Status Meet() {
    SDP_RETURN_IF_ERROR(nccl_->Check());
    SDP_ASSIGN_OR_RETURN(auto stream, device_.NewStream("peers leave"));
    SDP_RETURN_IF_ERROR(nccl_->Barrier(*stream));
    SDP_ASSIGN_OR_RETURN(cudaStream_t handle, device::UseCudaStream(*stream));
    const int64_t deadline_ns = MonotonicNs() + kLeaveDeadlineNs;
    while (true) {
      const cudaError_t state = cudaStreamQuery(handle);
      if (state != cudaErrorNotReady) {
        return device::CudaStatus(state, "cudaStreamQuery");
      }
      cudaGetLastError();
      if (MonotonicNs() > deadline_ns) {
        nccl_->Abort();
        return absl::DeadlineExceededError("the other ranks did not come");
      }
      const timespec pause = {0, 100'000};
      nanosleep(&pause, nullptr);
    }
  }

  device::Device& device_;
  const std::shared_ptr<device::CudaContext> context_;
  std::unique_ptr<NcclCollective> nccl_;
  std::unique_ptr<PeerMemory> memory_;

  std::mutex mutex_;  // one operation is enqueued at a time
  OperationWatch watch_;
  uint64_t pushed_ = 0, consumed_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PeerCollective>> NewPeerCollective(
    device::Device& device, std::unique_ptr<NcclCollective>& nccl,
    size_t staging_bytes, int64_t deadline_ns) {
  if (nccl->world_size() == 1) return nullptr;
  SDP_ASSIGN_OR_RETURN(auto context, device::CudaContextOf(device));
  SDP_RETURN_IF_ERROR(context->Use());
  absl::StatusOr<std::unique_ptr<PeerMemory>> memory =
      PeerMemory::Create(device, *nccl, staging_bytes, ForbiddenByUser());
  if (absl::IsUnavailable(memory.status())) {
    spdlog::info("rank {}: GPUs exchange through NCCL: {}", nccl->rank(),
                 std::string(memory.status().message()));
    return nullptr;
  }
  SDP_RETURN_IF_ERROR(memory.status());
  auto collective = std::make_unique<PeerCollectiveImpl>(
      device, std::move(context), *std::move(memory), std::move(nccl),
      deadline_ns);
  SDP_RETURN_IF_ERROR(collective->Create());
  return collective;
}

}  // namespace slidedp::collective
