#include "tests/contract/collective_ranks.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status.h"
#include "common/shm/segment.h"

namespace slidedp::collective {
namespace {

// A status that crosses from a child process.
struct Outcome {
  int code;
  bool reported;
  char message[1024];
};

absl::Status RunRank(const RankSetup& setup, int rank, void* region,
                     size_t bytes, const RankBody& body) {
  const auto device = device::NewCpuDevice({});
  SDP_ASSIGN_OR_RETURN(
      const auto collective,
      NewShmCollective(*device, region, bytes, rank, setup.world_size,
                       setup.staging_bytes, setup.deadline_ns));
  SDP_ASSIGN_OR_RETURN(const auto stream, device->NewStream("reduce"));
  RankContext context = {*collective, *device, *stream};
  return Annotate(body(context), absl::StrCat("rank ", rank));
}

shm::Segment NewExchange(const RankSetup& setup) {
  auto segment = shm::Segment::Create(
      shm::SegmentKind::kExchange,
      ExchangeBytes(setup.world_size, setup.staging_bytes), "test");
  SDP_CHECK(segment.ok(), segment.status().message());
  return *std::move(segment);
}

void RunChild(const RankSetup& setup, int rank, int fd, uint64_t bytes,
              const RankBody& body, Outcome* outcome) {
  absl::Status status;
  // As a worker does: its own mapping of the descriptor.
  auto mapping =
      shm::Mapping::Map(fd, bytes, shm::Access::kReadWrite, "exchange");
  status = mapping.ok() ? RunRank(setup, rank, mapping->data(), bytes, body)
                        : mapping.status();
  outcome->code = static_cast<int>(status.code());
  const size_t length =
      std::min(status.message().size(), sizeof(outcome->message) - 1);
  status.message().copy(outcome->message, length);
  outcome->reported = true;
}

}  // namespace

std::vector<absl::Status> RunAsThreads(const RankSetup& setup,
                                       const RankBody& body) {
  const shm::Segment exchange = NewExchange(setup);
  std::vector<absl::Status> statuses(setup.world_size);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < setup.world_size; ++rank) {
    ranks.emplace_back([&, rank] {
      statuses[rank] = RunRank(setup, rank, exchange.mapping().data(),
                               exchange.bytes(), body);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  return statuses;
}

std::vector<absl::Status> RunAsProcesses(const RankSetup& setup,
                                         const RankBody& body) {
  const shm::Segment exchange = NewExchange(setup);
  auto* outcomes = static_cast<Outcome*>(
      mmap(nullptr, setup.world_size * sizeof(Outcome), PROT_READ | PROT_WRITE,
           MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  SDP_CHECK(outcomes != MAP_FAILED, "mmap failed");
  std::vector<pid_t> children;
  for (int rank = 0; rank < setup.world_size; ++rank) {
    const pid_t child = fork();
    SDP_CHECK(child >= 0, "fork failed");
    if (child == 0) {
      RunChild(setup, rank, exchange.fd(), exchange.bytes(), body,
               &outcomes[rank]);
      _exit(0);
    }
    children.push_back(child);
  }
  std::vector<absl::Status> statuses;
  for (int rank = 0; rank < setup.world_size; ++rank) {
    int exit_status;
    while (waitpid(children[rank], &exit_status, 0) < 0 && errno == EINTR) {
    }
    const Outcome& outcome = outcomes[rank];
    statuses.push_back(
        outcome.reported
            ? absl::Status(static_cast<absl::StatusCode>(outcome.code),
                           outcome.message)
            : absl::InternalError(absl::StrCat("rank ", rank, " died")));
  }
  munmap(outcomes, setup.world_size * sizeof(Outcome));
  return statuses;
}

std::vector<absl::Status> RunSolo(const RankSetup& setup,
                                  const RankBody& body) {
  SDP_CHECK(setup.world_size == 1, "one rank only");
  const auto device = device::NewCpuDevice({});
  const auto collective = NewSoloCollective(*device);
  const auto stream = device->NewStream("reduce");
  SDP_CHECK(stream.ok(), stream.status().message());
  RankContext context = {*collective, *device, **stream};
  return {body(context)};
}

}  // namespace slidedp::collective
