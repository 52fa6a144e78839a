#include "common/collective/nccl_collective.h"

#include <nccl.h>
#include <time.h>

#include <cstring>
#include <functional>
#include <mutex>
#include <utility>

#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/collective/cuda_operation_watch.h"
#include "common/collective/nccl_status.h"
#include "common/collective/operation.h"
#include "common/device/cuda_status.h"
#include "common/device/cuda_stream.h"

namespace slidedp::collective {
namespace {

// Of the buffer on which each operation runs once: a line per rank.
constexpr size_t kWarmUpShardBytes = 1024;

ncclDataType_t NcclType(DType dtype) {
  return dtype == DType::kF32 ? ncclFloat32 : ncclBfloat16;
}

void Pause(int64_t ns) {
  const timespec pause = {0, static_cast<long>(ns)};
  nanosleep(&pause, nullptr);
}

class NcclCollectiveImpl : public NcclCollective {
 public:
  NcclCollectiveImpl(device::Device& device, int rank, int world_size,
                     int64_t deadline_ns)
      : device_(device),
        rank_(rank),
        world_size_(world_size),
        deadline_ns_(deadline_ns),
        watch_(deadline_ns) {}

  ~NcclCollectiveImpl() override {
    const absl::Status status = Finish();
    if (!status.ok()) {
      spdlog::warn("rank {}: leaving NCCL: {}", rank_,
                   std::string(status.message()));
      Abort();
    }
  }

  absl::Status Init(absl::string_view unique_id) {
    SDP_ASSIGN_OR_RETURN(context_, device::CudaContextOf(device_));
    SDP_RETURN_IF_ERROR(context_->Use());
    SDP_RETURN_IF_ERROR(watch_.Create());
    ncclUniqueId id;
    std::memcpy(id.internal, unique_id.data(), sizeof(id.internal));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    std::lock_guard<std::mutex> lock(mutex_);
    ncclComm_t comm = nullptr;
    absl::Status status = NcclStatus(
        ncclCommInitRankConfig(&comm, world_size_, id, rank_, &config), comm,
        "ncclCommInitRankConfig");
    SetComm(comm);
    if (status.ok()) status = AwaitLocked("joining");
    return status;
  }

  // Loads every kernel and connects what it uses.
  absl::Status WarmUp() {
    SDP_ASSIGN_OR_RETURN(auto stream, device_.NewStream("nccl warm-up"));
    const size_t bytes = kWarmUpShardBytes * world_size_;
    SDP_ASSIGN_OR_RETURN(scratch_, device_.Allocate("NCCL barrier", bytes,
                                                    device::Memory::kDevice));
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      const size_t count = kWarmUpShardBytes / DTypeBytes(dtype);
      SDP_RETURN_IF_ERROR(AllReduce(scratch_.data(), count, dtype, *stream));
      SDP_RETURN_IF_ERROR(
          ReduceScatter(scratch_.data(), count, dtype, *stream));
      for (int root = 0; root < world_size_; ++root) {
        SDP_RETURN_IF_ERROR(
            Reduce(scratch_.data(), count, dtype, root, *stream));
      }
    }
    SDP_RETURN_IF_ERROR(AllGather(scratch_.data(), kWarmUpShardBytes, *stream));
    return AwaitStream(*stream);
  }

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }

  absl::Status AllReduce(void* data, size_t count, DType dtype,
                         device::Stream& stream) override {
    return Launch({OperationKind::kAllReduce, dtype, 0, count}, data, stream,
                  [&](cudaStream_t handle) {
                    return ncclAllReduce(data, data, count, NcclType(dtype),
                                         ncclSum, comm_, handle);
                  });
  }

  absl::Status Reduce(void* data, size_t count, DType dtype, int root,
                      device::Stream& stream) override {
    return Launch({OperationKind::kReduce, dtype, root, count}, data, stream,
                  [&](cudaStream_t handle) {
                    // Only the root's data may be written.
                    return ncclReduce(data, rank_ == root ? data : nullptr,
                                      count, NcclType(dtype), ncclSum, root,
                                      comm_, handle);
                  });
  }

  absl::Status ReduceScatter(void* data, size_t shard_count, DType dtype,
                             device::Stream& stream) override {
    return Launch({OperationKind::kReduceScatter, dtype, 0, shard_count}, data,
                  stream, [&](cudaStream_t handle) {
                    return ncclReduceScatter(
                        data, Shard(data, shard_count * DTypeBytes(dtype)),
                        shard_count, NcclType(dtype), ncclSum, comm_, handle);
                  });
  }

  absl::Status AllGather(void* data, size_t shard_bytes,
                         device::Stream& stream) override {
    return Launch({OperationKind::kAllGather, DType::kF32, 0, shard_bytes},
                  data, stream, [&](cudaStream_t handle) {
                    return ncclAllGather(Shard(data, shard_bytes), data,
                                         shard_bytes, ncclUint8, comm_, handle);
                  });
  }

  absl::Status Barrier(device::Stream& stream) override {
    return Launch({OperationKind::kBarrier}, scratch_.data(), stream,
                  [&](cudaStream_t handle) {
                    return ncclAllReduce(scratch_.data(), scratch_.data(), 1,
                                         ncclFloat32, ncclSum, comm_, handle);
                  });
  }

  // Never waits for a launch: one into a full stream waits for the GPU.
  absl::Status Check() override {
    SDP_RETURN_IF_ERROR(context_->Use());
    {
      std::lock_guard<std::mutex> lock(comm_mutex_);
      SDP_RETURN_IF_ERROR(Usable());
      ncclResult_t state = ncclSuccess;
      SDP_RETURN_IF_ERROR(Named(NcclStatus(ncclCommGetAsyncError(comm_, &state),
                                           comm_, "ncclCommGetAsyncError")));
      SDP_RETURN_IF_ERROR(
          Named(NcclStatus(state, comm_, "asynchronous error")));
    }
    return Named(watch_.Check());
  }

  void Abort() override {
    ncclComm_t comm;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      comm = SetComm(nullptr);
    }
    if (comm == nullptr || !context_->Use().ok()) return;
    ncclCommAbort(comm);
  }

 private:
  absl::Status Named(const absl::Status& status) const {
    return Annotate(status, absl::StrCat("rank ", rank_));
  }

  void* Shard(void* data, size_t shard_bytes) const {
    return static_cast<char*>(data) + rank_ * shard_bytes;
  }

  ncclComm_t SetComm(ncclComm_t comm) {
    std::lock_guard<std::mutex> lock(comm_mutex_);
    return std::exchange(comm_, comm);
  }

  absl::Status Usable() const {
    if (comm_ != nullptr) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", rank_, ": the communicator was aborted"));
  }

  absl::Status Launch(const Operation& operation, void* data,
                      device::Stream& stream,
                      const std::function<ncclResult_t(cudaStream_t)>& call) {
    SDP_RETURN_IF_ERROR(CheckOperation(operation, data, world_size_));
    SDP_ASSIGN_OR_RETURN(cudaStream_t handle, device::UseCudaStream(stream));
    if (operation.count == 0 && operation.kind != OperationKind::kBarrier) {
      return absl::OkStatus();
    }
    const std::string what = Describe(operation.Packed(), operation.count);
    std::lock_guard<std::mutex> lock(mutex_);
    SDP_RETURN_IF_ERROR(Usable());
    SDP_RETURN_IF_ERROR(Named(watch_.Begin(operation, handle)));
    SDP_RETURN_IF_ERROR(Named(NcclStatus(call(handle), comm_, what)));
    // Only when it is in the stream may anything be enqueued behind it.
    SDP_RETURN_IF_ERROR(AwaitLocked(what));
    return Named(watch_.End(handle));
  }

  // Until NCCL's own thread has done what the last call asked for.
  absl::Status AwaitLocked(absl::string_view what) {
    const int64_t deadline_ns = MonotonicNs() + deadline_ns_;
    ncclResult_t state = ncclInProgress;
    for (int64_t tries = 0;; ++tries) {
      SDP_RETURN_IF_ERROR(
          Named(NcclStatus(ncclCommGetAsyncError(comm_, &state), comm_, what)));
      if (state != ncclInProgress) break;
      if (MonotonicNs() > deadline_ns) {
        return absl::DeadlineExceededError(absl::StrCat(
            "rank ", rank_, ": ", what, ": not all of the ", world_size_,
            " ranks came within ", FormatSeconds(deadline_ns_ * 1e-9)));
      }
      if (tries > 1000) Pause(100'000);
    }
    return Named(NcclStatus(state, comm_, what));
  }

  absl::Status AwaitStream(device::Stream& stream) {
    SDP_ASSIGN_OR_RETURN(cudaStream_t handle, device::UseCudaStream(stream));
    const int64_t deadline_ns = MonotonicNs() + deadline_ns_;
    while (true) {
      const cudaError_t state = cudaStreamQuery(handle);
      if (state != cudaErrorNotReady) {
        return device::CudaStatus(state, "cudaStreamQuery");
      }
      cudaGetLastError();
      SDP_RETURN_IF_ERROR(Check());
      if (MonotonicNs() > deadline_ns) {
        // Lets the stream be destroyed.
        Abort();
        return absl::DeadlineExceededError(
            absl::StrCat("rank ", rank_,
                         ": the first operations of NCCL did not end "
                         "within ",
                         FormatSeconds(deadline_ns_ * 1e-9)));
      }
      Pause(100'000);
    }
  }

  absl::Status Finish() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (comm_ == nullptr) return absl::OkStatus();
    SDP_RETURN_IF_ERROR(context_->Use());
    if (context_->abandoned.load()) {
      return absl::CancelledError("a stream was given up");
    }
    SDP_RETURN_IF_ERROR(
        NcclStatus(ncclCommFinalize(comm_), comm_, "ncclCommFinalize"));
    SDP_RETURN_IF_ERROR(AwaitLocked("ncclCommFinalize"));
    SDP_RETURN_IF_ERROR(NcclStatus(ncclCommDestroy(SetComm(nullptr)), nullptr,
                                   "ncclCommDestroy"));
    return absl::OkStatus();
  }

  device::Device& device_;
  const int rank_;
  const int world_size_;
  const int64_t deadline_ns_;
  std::shared_ptr<device::CudaContext> context_;
  device::Buffer scratch_;

  // One call into NCCL at a time, but for Check's. Held while comm_ changes.
  std::mutex mutex_;
  std::mutex comm_mutex_;      // held while comm_ changes, and by Check
  ncclComm_t comm_ = nullptr;  // read under either
  OperationWatch watch_;
};

}  // namespace

absl::StatusOr<std::string> NewNcclUniqueId() {
  ncclUniqueId id;
  SDP_RETURN_IF_ERROR(
      NcclStatus(ncclGetUniqueId(&id), nullptr, "ncclGetUniqueId"));
  return std::string(id.internal, sizeof(id.internal));
}

absl::StatusOr<std::unique_ptr<NcclCollective>> NewNcclCollective(
    device::Device& device, absl::string_view unique_id, int rank,
    int world_size, int64_t deadline_ns) {
  if (unique_id.size() != NCCL_UNIQUE_ID_BYTES) {
    return absl::InvalidArgumentError(
        absl::StrCat("a NCCL id of ", unique_id.size(), " bytes; it has ",
                     NCCL_UNIQUE_ID_BYTES));
  }
  if (world_size < 1 || rank < 0 || rank >= world_size || deadline_ns <= 0) {
    return absl::InvalidArgumentError(absl::StrCat("NCCL rank ", rank, " of ",
                                                   world_size, ", deadline ",
                                                   deadline_ns, " ns"));
  }
  auto collective = std::make_unique<NcclCollectiveImpl>(
      device, rank, world_size, deadline_ns);
  SDP_RETURN_IF_ERROR(collective->Init(unique_id));
  SDP_RETURN_IF_ERROR(collective->WarmUp());
  return collective;
}

}  // namespace slidedp::collective
