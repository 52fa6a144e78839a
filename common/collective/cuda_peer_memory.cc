#include "common/collective/cuda_peer_memory.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/device/cuda_status.h"

namespace slidedp::collective {
namespace {

constexpr size_t kLineBytes = 128;
constexpr size_t kPieceAlignment = 256;
// What CUDA exports is the block that an allocation lies in, from its start;
// smaller allocations share one of this size.
constexpr size_t kBlockBytes = size_t{2} << 20;

// What ranks tell each other: a shard of an all-gather.
struct Message {
  uint64_t good = 0;
  cudaIpcMemHandle_t handle = {};
};

// Host memory around a Collective that works on the device.
class Exchange {
 public:
  static absl::StatusOr<std::unique_ptr<Exchange>> Create(
      device::Device& device, Collective& ranks) {
    auto exchange = std::unique_ptr<Exchange>(new Exchange(device, ranks));
    const size_t bytes = sizeof(Message) * ranks.world_size();
    SDP_ASSIGN_OR_RETURN(exchange->stream_, device.NewStream("peers"));
    SDP_ASSIGN_OR_RETURN(
        exchange->device_buffer_,
        device.Allocate("peer handles", bytes, device::Memory::kDevice));
    SDP_ASSIGN_OR_RETURN(
        exchange->host_,
        device.Allocate("peer handles", bytes, device::Memory::kPinnedHost));
    return exchange;
  }

  // Everybody's, by rank; valid until the next call.
  absl::StatusOr<const Message*> AllGather(const Message& mine) {
    auto* all = host_.as<Message>();
    all[ranks_.rank()] = mine;
    SDP_RETURN_IF_ERROR(
        device_.Copy(device_buffer_.data(), all, host_.bytes(), *stream_));
    SDP_RETURN_IF_ERROR(
        ranks_.AllGather(device_buffer_.data(), sizeof(Message), *stream_));
    SDP_RETURN_IF_ERROR(
        device_.Copy(all, device_buffer_.data(), host_.bytes(), *stream_));
    SDP_RETURN_IF_ERROR(device_.Synchronize(*stream_));
    return all;
  }

 private:
  Exchange(device::Device& device, Collective& ranks)
      : device_(device), ranks_(ranks) {}

  device::Device& device_;
  Collective& ranks_;
  std::unique_ptr<device::Stream> stream_;
  device::Buffer device_buffer_, host_;
};

// The lowest rank that is not good, or -1.
int NotGood(const Message* all, int world_size) {
  for (int rank = 0; rank < world_size; ++rank) {
    if (all[rank].good == 0) return rank;
  }
  return -1;
}

absl::Status Refused(int rank, const std::string& own_reason) {
  return absl::UnavailableError(
      own_reason.empty() ? absl::StrCat("rank ", rank, " says no; see its log")
                         : own_reason);
}

}  // namespace

PeerMemory::PeerMemory(int rank, int world_size, size_t bytes)
    : rank_(rank),
      world_size_(world_size),
      header_bytes_(AlignUp(2 * kLineBytes * world_size, kPieceAlignment)),
      piece_bytes_((bytes - header_bytes_) / (2 * (world_size - 1)) /
                   kPieceAlignment * kPieceAlignment),
      bases_(world_size, nullptr) {}

PeerMemory::~PeerMemory() { Unmap(); }

void PeerMemory::Unmap() {
  for (int rank = 0; rank < world_size_; ++rank) {
    if (rank != rank_ && bases_[rank] != nullptr) {
      cudaIpcCloseMemHandle(bases_[rank]);
      bases_[rank] = nullptr;
    }
  }
  cudaGetLastError();
}

std::string PeerMemory::MapOthers(const char* handles) {
  for (int rank = 0; rank < world_size_; ++rank) {
    if (rank == rank_) {
      bases_[rank] = own_.as<char>();
      continue;
    }
    Message message;
    std::memcpy(&message, handles + rank * sizeof(Message), sizeof(message));
    void* base = nullptr;
    const absl::Status status =
        device::CudaStatus(cudaIpcOpenMemHandle(&base, message.handle,
                                                cudaIpcMemLazyEnablePeerAccess),
                           "cudaIpcOpenMemHandle");
    if (!status.ok()) {
      return absl::StrCat("memory of rank ", rank, ": ", status.message());
    }
    bases_[rank] = static_cast<char*>(base);
  }
  return "";
}

absl::StatusOr<std::unique_ptr<PeerMemory>> PeerMemory::Create(
    device::Device& device, Collective& ranks, size_t bytes, bool unwilling) {
  auto memory = std::unique_ptr<PeerMemory>(
      new PeerMemory(ranks.rank(), ranks.world_size(), bytes));
  if (bytes % kBlockBytes != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "staging of ", bytes, " bytes is not whole blocks of ", kBlockBytes));
  }
  SDP_ASSIGN_OR_RETURN(auto exchange, Exchange::Create(device, ranks));
  SDP_ASSIGN_OR_RETURN(memory->own_, device.Allocate("peer staging", bytes,
                                                     device::Memory::kDevice));
  Message mine;
  std::string reason;
  const absl::Status exported =
      unwilling ? absl::UnavailableError("NCCL_P2P_DISABLE is set")
                : device::CudaStatus(
                      cudaIpcGetMemHandle(&mine.handle, memory->own_.data()),
                      "cudaIpcGetMemHandle");
  mine.good = exported.ok();
  if (!exported.ok()) reason = std::string(exported.message());
  SDP_ASSIGN_OR_RETURN(const Message* all, exchange->AllGather(mine));
  int refusing = NotGood(all, ranks.world_size());
  if (refusing >= 0) return Refused(refusing, reason);

  reason = memory->MapOthers(reinterpret_cast<const char*>(all));
  mine.good = reason.empty();
  SDP_ASSIGN_OR_RETURN(all, exchange->AllGather(mine));
  refusing = NotGood(all, ranks.world_size());
  if (refusing >= 0) return Refused(refusing, reason);
  return memory;
}

void* PeerMemory::Piece(int to, int from, uint64_t number) const {
  const uint64_t sender = from < to ? from : from - 1;
  const uint64_t slot = number % 2;
  return bases_[to] + header_bytes_ +
         (slot * (world_size_ - 1) + sender) * piece_bytes_;
}

CUdeviceptr PeerMemory::Word(int of, int by, int which) const {
  return reinterpret_cast<CUdeviceptr>(bases_[of]) +
         (2 * by + which) * kLineBytes;
}

}  // namespace slidedp::collective
