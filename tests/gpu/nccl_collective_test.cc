// The Collective contract over NCCL, with one rank and, where there are two
// GPUs, with two; and what only NCCL has.
#include "common/collective/nccl_collective.h"

#include <time.h>

#include <atomic>
#include <new>
#include <thread>

#include "common/base/clock.h"
#include "common/base/status.h"
#include "common/device/cuda_device.h"
#include "tests/contract/collective_contract_test.h"
#include "tests/gpu/nccl_ranks.h"
#include "tests/testing/status_matchers.h"

namespace slidedp::collective {
namespace {

using ::testing::HasSubstr;
using testing::StatusIs;

std::vector<int> WorldSizes() {
  static const int gpus = CountGpus();
  return gpus >= 2 ? std::vector<int>{1, 2} : std::vector<int>{1};
}

INSTANTIATE_TEST_SUITE_P(Nccl, CollectiveContract,
                         ::testing::Combine(::testing::Values(CollectiveBackend{
                                                "nccl", RunOverNccl,
                                                /*staged=*/false}),
                                            ::testing::ValuesIn(WorldSizes())),
                         CollectiveContractName);

RankSetup World(int size, int64_t deadline_ns = 60'000'000'000) {
  RankSetup setup;
  setup.world_size = size;
  setup.deadline_ns = deadline_ns;
  return setup;
}

TEST(NcclCollectiveTest, DeviceMemoryLargerThanAnyBufferOfNccl) {
  for (const int world : WorldSizes()) {
    for (const absl::Status& status :
         RunOverNccl(World(world), [](RankContext& rank) -> absl::Status {
           const size_t count = (size_t{64} << 20) + 17;
           const int world = rank.collective.world_size();
           SDP_ASSIGN_OR_RETURN(device::Buffer data,
                                rank.device.Allocate("data", 4 * count * world,
                                                     device::Memory::kDevice));
           SDP_ASSIGN_OR_RETURN(
               device::Buffer host,
               rank.device.Allocate("host", 4 * count * world,
                                    device::Memory::kPinnedHost));
           float* values = host.as<float>();
           for (size_t i = 0; i < count * world; ++i) {
             values[i] = static_cast<float>(i % 1000 + rank.collective.rank());
           }
           SDP_RETURN_IF_ERROR(rank.device.Copy(data.data(), host.data(),
                                                host.bytes(), rank.stream));
           SDP_RETURN_IF_ERROR(rank.collective.ReduceScatter(
               data.data(), count, DType::kF32, rank.stream));
           SDP_RETURN_IF_ERROR(
               rank.collective.AllGather(data.data(), 4 * count, rank.stream));
           SDP_RETURN_IF_ERROR(rank.device.Copy(host.data(), data.data(),
                                                host.bytes(), rank.stream));
           SDP_RETURN_IF_ERROR(rank.device.Synchronize(rank.stream));
           for (size_t i = 0; i < count * world; ++i) {
             const float want = static_cast<float>(world * (i % 1000) +
                                                   world * (world - 1) / 2);
             if (values[i] != want) {
               return absl::InternalError(
                   absl::StrCat("element ", i, " is ", values[i]));
             }
           }
           return absl::OkStatus();
         })) {
      EXPECT_OK(status);
    }
  }
}

TEST(NcclCollectiveTest, ARankThatNeverJoinsIsMissedAtTheDeadline) {
  if (WorldSizes().size() < 2) GTEST_SKIP() << "needs two GPUs";
  // Each waits alone for a rank 1 that has another id.
  const auto statuses = RunOverNccl(World(2), [](RankContext& rank) {
    const auto id = NewNcclUniqueId();
    const auto joined = NewNcclCollective(rank.device, *id, 0, 2,
                                          /*deadline_ns=*/2'000'000'000);
    if (absl::IsDeadlineExceeded(joined.status())) return absl::OkStatus();
    return absl::InternalError(
        absl::StrCat("joined alone: ", joined.status().ToString()));
  });
  for (const absl::Status& status : statuses) EXPECT_OK(status);
}

TEST(NcclCollectiveTest, AMissingRankShowsInCheckAndAbortEndsTheWait) {
  if (WorldSizes().size() < 2) GTEST_SKIP() << "needs two GPUs";
  const auto statuses = RunOverNccl(
      World(2, 8'000'000'000), [](RankContext& rank) -> absl::Status {
        auto& nccl = static_cast<NcclCollective&>(rank.collective);
        SDP_ASSIGN_OR_RETURN(
            device::Buffer data,
            rank.device.Allocate("data", 4096, device::Memory::kDevice));
        if (rank.collective.rank() == 0) {
          SDP_RETURN_IF_ERROR(
              nccl.AllReduce(data.data(), 1024, DType::kF32, rank.stream));
        }
        // Rank 1 stays away until rank 0 has given up.
        const int64_t give_up_ns = MonotonicNs() + 40'000'000'000;
        absl::Status seen;
        while (seen.ok() && MonotonicNs() < give_up_ns) {
          const timespec pause = {0, 50'000'000};
          nanosleep(&pause, nullptr);
          seen = nccl.Check();
          if (rank.collective.rank() == 1 &&
              MonotonicNs() > give_up_ns - 25'000'000'000) {
            break;
          }
        }
        nccl.Abort();
        SDP_RETURN_IF_ERROR(rank.device.Synchronize(rank.stream));
        if (rank.collective.rank() == 0 && !absl::IsDeadlineExceeded(seen)) {
          return absl::InternalError(
              absl::StrCat("check said ", seen.ToString()));
        }
        return absl::OkStatus();
      });
  // RunOverNccl's own last Check finds the communicators aborted.
  for (const absl::Status& status : statuses) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition,
                                 HasSubstr("aborted")));
  }
}

TEST(NcclCollectiveTest, CheckDoesNotWaitForALaunchIntoAFullStream) {
  if (WorldSizes().size() < 2) GTEST_SKIP() << "needs two GPUs";
  // More than a stream holds (device.h).
  constexpr int kOperations = 3000;
  const auto statuses =
      RunOverNccl(World(2), [](RankContext& rank) -> absl::Status {
        auto& nccl = static_cast<NcclCollective&>(rank.collective);
        SDP_ASSIGN_OR_RETURN(
            device::Buffer data,
            rank.device.Allocate("data", 4096, device::Memory::kDevice));
        SDP_ASSIGN_OR_RETURN(
            device::Buffer page,
            rank.device.Allocate("word", 4096, device::Memory::kPinnedHost));
        auto* word = new (page.data()) std::atomic<uint64_t>(0);
        SDP_RETURN_IF_ERROR(rank.device.WaitWord(word, 1, rank.stream));
        std::atomic<int> enqueued = 0;
        absl::Status launched;
        std::thread launcher([&] {
          for (int i = 0; i < kOperations && launched.ok(); ++i) {
            launched =
                nccl.AllReduce(data.data(), 1024, DType::kF32, rank.stream);
            ++enqueued;
          }
        });
        // Until the launcher stands still; without the word it can't be done.
        absl::Status checked;
        for (int before = -1; checked.ok() && enqueued != before;) {
          before = enqueued;
          const timespec pause = {1, 0};
          nanosleep(&pause, nullptr);
          checked = nccl.Check();
        }
        const bool blocked = enqueued < kOperations;
        word->store(1, std::memory_order_release);
        launcher.join();
        SDP_RETURN_IF_ERROR(launched);
        SDP_RETURN_IF_ERROR(checked);
        SDP_RETURN_IF_ERROR(rank.device.Synchronize(rank.stream));
        return blocked ? absl::OkStatus()
                       : absl::InternalError("the stream was never full");
      });
  for (const absl::Status& status : statuses) EXPECT_OK(status);
}

TEST(NcclCollectiveTest, ArgumentsThatMakeNoSenseAreRefused) {
  const auto statuses = RunOverNccl(World(1), [](RankContext& rank) {
    const std::string id(128, 'x');
    const bool refused =
        absl::IsInvalidArgument(
            NewNcclCollective(rank.device, "short", 0, 1, 1).status()) &&
        absl::IsInvalidArgument(
            NewNcclCollective(rank.device, id, 1, 1, 1).status()) &&
        absl::IsInvalidArgument(
            NewNcclCollective(rank.device, id, 0, 1, 0).status());
    return refused ? absl::OkStatus() : absl::InternalError("not refused");
  });
  EXPECT_OK(statuses[0]);
}

}  // namespace
}  // namespace slidedp::collective
