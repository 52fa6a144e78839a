#include "tests/gpu/nccl_ranks.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "common/base/check.h"
#include "common/base/status.h"
#include "common/collective/cuda_peer_collective.h"
#include "common/collective/nccl_collective.h"
#include "common/device/accelerator.h"
#include "tests/gpu/child.h"

namespace slidedp::collective {
namespace {

constexpr size_t kIdBytes = 128;

// One page that parent and children share.
struct Meeting {
  std::atomic<bool> id_ready;
  char id[kIdBytes];
  struct {
    int code;
    bool reported;
    char message[1024];
  } outcomes[16];
};

absl::StatusOr<std::string> MeetForId(Meeting& meeting, int rank) {
  if (rank == 0) {
    SDP_ASSIGN_OR_RETURN(const std::string id, NewNcclUniqueId());
    SDP_CHECK(id.size() == kIdBytes, "an id of another size");
    std::memcpy(meeting.id, id.data(), kIdBytes);
    meeting.id_ready.store(true, std::memory_order_release);
  }
  while (!meeting.id_ready.load(std::memory_order_acquire)) {
    std::this_thread::yield();
  }
  return std::string(meeting.id, kIdBytes);
}

// Small, so that tests need many pieces.
constexpr size_t kPeerStagingBytes = size_t{2} << 20;

enum class Way { kNccl, kPeers };

absl::Status RunBody(Collective& collective, device::Device& device,
                     const RankBody& body) {
  SDP_ASSIGN_OR_RETURN(const auto stream, device.NewStream("reduce"));
  RankContext context = {collective, device, *stream};
  return Annotate(body(context), absl::StrCat("rank ", collective.rank()));
}

absl::Status RunRank(Way way, const RankSetup& setup, int rank,
                     Meeting& meeting, const RankBody& body) {
  device::AcceleratorOptions options;
  options.rank = rank;
  SDP_ASSIGN_OR_RETURN(const auto device, device::NewAccelerator(options));
  SDP_ASSIGN_OR_RETURN(const std::string id, MeetForId(meeting, rank));
  SDP_ASSIGN_OR_RETURN(auto nccl,
                       NewNcclCollective(*device, id, rank, setup.world_size,
                                         setup.deadline_ns));
  if (way == Way::kNccl) {
    SDP_RETURN_IF_ERROR(RunBody(*nccl, *device, body));
    return nccl->Check();
  }
  SDP_ASSIGN_OR_RETURN(
      const auto peers,
      NewPeerCollective(*device, nccl, kPeerStagingBytes, setup.deadline_ns));
  if (peers == nullptr) {
    return absl::UnavailableError("these GPUs don't reach each other");
  }
  SDP_RETURN_IF_ERROR(RunBody(*peers, *device, body));
  return peers->Check();
}

}  // namespace

int CountGpus() {
  const pid_t child = fork();
  SDP_CHECK(child >= 0, "fork failed");
  if (child == 0) {
    const auto gpus = device::ListAccelerators();
    _exit(gpus.ok() ? static_cast<int>(gpus->size()) : 0);
  }
  return testing::AwaitChild(child);
}

namespace {

std::vector<absl::Status> RunProcesses(Way way, const RankSetup& setup,
                                       const RankBody& body) {
  void* page = mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  SDP_CHECK(page != MAP_FAILED, "mmap failed");
  auto* meeting = new (page) Meeting{};
  std::vector<pid_t> children;
  for (int rank = 0; rank < setup.world_size; ++rank) {
    const pid_t child = fork();
    SDP_CHECK(child >= 0, "fork failed");
    if (child == 0) {
      const absl::Status status = RunRank(way, setup, rank, *meeting, body);
      auto& outcome = meeting->outcomes[rank];
      outcome.code = static_cast<int>(status.code());
      status.message().copy(outcome.message, sizeof(outcome.message) - 1);
      outcome.reported = true;
      _exit(0);
    }
    children.push_back(child);
  }
  std::vector<absl::Status> statuses;
  for (int rank = 0; rank < setup.world_size; ++rank) {
    testing::AwaitChild(children[rank]);
    const auto& outcome = meeting->outcomes[rank];
    statuses.push_back(
        outcome.reported
            ? absl::Status(static_cast<absl::StatusCode>(outcome.code),
                           outcome.message)
            : absl::InternalError(absl::StrCat("rank ", rank, " died")));
  }
  munmap(page, sizeof(Meeting));
  return statuses;
}

}  // namespace

std::vector<absl::Status> RunOverNccl(const RankSetup& setup,
                                      const RankBody& body) {
  return RunProcesses(Way::kNccl, setup, body);
}

std::vector<absl::Status> RunOverPeers(const RankSetup& setup,
                                       const RankBody& body) {
  return RunProcesses(Way::kPeers, setup, body);
}

}  // namespace slidedp::collective
