// What only the shared-memory collective has: deadlines, and an exchange
// segment that may be wrong.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/collective/collective.h"
#include "common/collective/exchange_layout.h"
#include "common/shm/segment.h"
#include "tests/contract/collective_ranks.h"
#include "tests/testing/status_matchers.h"

namespace slidedp::collective {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;

constexpr int64_t kShortNs = 5'000'000;
constexpr int64_t kHourNs = 3'600'000'000'000;

// Ranks that the test drives one by one, from its own thread.
class ShmCollectiveTest : public ::testing::Test {
 protected:
  static constexpr size_t kStaging = 4096;

  void Start(int world_size) {
    world_size_ = world_size;
    auto segment =
        shm::Segment::Create(shm::SegmentKind::kExchange,
                             ExchangeBytes(world_size, kStaging), "test");
    ASSERT_THAT(segment, IsOk());
    exchange_ = *std::move(segment);
  }
  absl::StatusOr<std::unique_ptr<Collective>> Join(int rank,
                                                   int64_t deadline_ns) {
    return NewShmCollective(*device_, exchange_.mapping().data(),
                            exchange_.bytes(), rank, world_size_, kStaging,
                            deadline_ns);
  }
  absl::Status BarrierOf(Collective& rank) {
    const auto stream = device_->NewStream(absl::StrCat("rank ", rank.rank()));
    SDP_RETURN_IF_ERROR(stream.status());
    SDP_RETURN_IF_ERROR(rank.Barrier(**stream));
    return device_->Synchronize(**stream);
  }

  std::unique_ptr<device::Device> device_ = device::NewCpuDevice({});
  shm::Segment exchange_;
  int world_size_ = 0;
};

TEST_F(ShmCollectiveTest, TheDeadlineNamesEveryMissingRank) {
  Start(4);
  const auto second = Join(2, kShortNs);
  ASSERT_THAT(second, IsOk());
  EXPECT_THAT(BarrierOf(**second),
              StatusIs(absl::StatusCode::kDeadlineExceeded,
                       EndsWith("missing ranks: 0, 1, 3")));
}

TEST_F(ShmCollectiveTest, ARankThatCameIsNotMissing) {
  Start(4);
  const auto early = Join(3, kShortNs);
  EXPECT_THAT(BarrierOf(**early),
              StatusIs(absl::StatusCode::kDeadlineExceeded));
  const auto late = Join(0, kShortNs);
  EXPECT_THAT(BarrierOf(**late), StatusIs(absl::StatusCode::kDeadlineExceeded,
                                          EndsWith("missing ranks: 1, 2")));
}

TEST_F(ShmCollectiveTest, AfterAFailureEveryOperationFails) {
  Start(2);
  const auto rank = Join(0, kShortNs);
  EXPECT_THAT(BarrierOf(**rank), StatusIs(absl::StatusCode::kDeadlineExceeded));
  // A new stream, so it is not the stream's own memory of the error.
  float data[3] = {1, 2, 3};
  const auto stream = device_->NewStream("other");
  ASSERT_THAT((*rank)->AllReduce(data, 3, DType::kF32, **stream), IsOk());
  EXPECT_THAT(
      device_->Synchronize(**stream),
      StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("barrier")));
}

TEST_F(ShmCollectiveTest, APeerKilledWithinAnOperationIsNamed) {
  Start(2);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto rank = Join(1, kHourNs);
    if (rank.ok()) BarrierOf(**rank).IgnoreError();
    _exit(1);  // only if it is not killed
  }
  const Exchange exchange(exchange_.mapping().data(), 2, kStaging);
  while (exchange.words(1).arrivals.load() == 0) std::this_thread::yield();
  ASSERT_EQ(kill(child, SIGKILL), 0);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));

  // It had arrived at the barrier, so that one is complete.
  const auto rank = Join(0, kShortNs);
  EXPECT_THAT(BarrierOf(**rank), IsOk());
  EXPECT_THAT(BarrierOf(**rank), StatusIs(absl::StatusCode::kDeadlineExceeded,
                                          EndsWith("missing ranks: 1")));
}

TEST_F(ShmCollectiveTest, DestroyingTheStreamEndsAnOperationThatWaits) {
  Start(2);
  const auto rank = Join(0, kHourNs);
  auto stream = *device_->NewStream("reduce");
  ASSERT_THAT((*rank)->Barrier(*stream), IsOk());
  stream.reset();
}

TEST_F(ShmCollectiveTest, TheCollectiveMayGoBeforeItsStream) {
  Start(1);
  std::atomic<uint64_t> gate{0};
  auto rank = Join(0, kHourNs);
  const auto stream = device_->NewStream("reduce");
  float data[2] = {1, -0.0f};
  ASSERT_THAT(device_->WaitWord(&gate, 1, **stream), IsOk());
  ASSERT_THAT((*rank)->AllReduce(data, 2, DType::kF32, **stream), IsOk());
  rank->reset();
  gate.store(1, std::memory_order_release);
  EXPECT_THAT(device_->Synchronize(**stream), IsOk());
  EXPECT_EQ(data[0], 1);
  EXPECT_TRUE(std::signbit(data[1]));
}

TEST_F(ShmCollectiveTest, RanksInDifferentOperationsHearOfIt) {
  RankSetup setup;
  setup.world_size = 3;
  const auto statuses = RunAsThreads(setup, [](RankContext& rank) {
    std::vector<float> data(100);
    const int r = rank.collective.rank();
    SDP_RETURN_IF_ERROR(rank.collective.Barrier(rank.stream));
    SDP_RETURN_IF_ERROR(
        r == 0 ? rank.collective.Reduce(data.data(), 10, DType::kF32, 2,
                                        rank.stream)
               : rank.collective.AllReduce(data.data(), 10 + r, DType::kBf16,
                                           rank.stream));
    return rank.device.Synchronize(rank.stream);
  });
  EXPECT_THAT(statuses[0],
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("rank 1 is in all-reduce of 11 bf16")));
  for (int rank : {1, 2}) {
    EXPECT_THAT(statuses[rank],
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         HasSubstr("rank 0 is in reduce of 10 f32 to rank 2")));
  }
}

TEST_F(ShmCollectiveTest, StreamsOrderedByEventsShareACollective) {
  RankSetup setup;
  setup.world_size = 2;
  const auto statuses = RunAsThreads(setup, [](RankContext& rank) {
    SDP_ASSIGN_OR_RETURN(const auto other, rank.device.NewStream("other"));
    SDP_ASSIGN_OR_RETURN(const auto event, rank.device.NewEvent());
    float data[3] = {1, 2, 3};
    for (int round = 0; round < 20; ++round) {
      device::Stream& now = round % 2 == 0 ? rank.stream : *other;
      device::Stream& next = round % 2 == 0 ? *other : rank.stream;
      SDP_RETURN_IF_ERROR(rank.collective.AllReduce(data, 3, DType::kF32, now));
      SDP_RETURN_IF_ERROR(rank.device.Record(*event, now));
      SDP_RETURN_IF_ERROR(rank.device.Wait(*event, next));
    }
    SDP_RETURN_IF_ERROR(rank.device.Synchronize(*other));
    SDP_RETURN_IF_ERROR(rank.device.Synchronize(rank.stream));
    return data[2] == 3.0f * (1 << 20) ? absl::OkStatus()
                                       : absl::InternalError("wrong sum");
  });
  for (const absl::Status& status : statuses) EXPECT_THAT(status, IsOk());
}

TEST_F(ShmCollectiveTest, StreamsNotOrderedAreAnError) {
  Start(1);
  std::atomic<uint64_t> gate{0};
  const auto rank = Join(0, kHourNs);
  const auto gated = device_->NewStream("gated");
  const auto other = device_->NewStream("other");
  ASSERT_THAT(device_->WaitWord(&gate, 1, **gated), IsOk());
  ASSERT_THAT((*rank)->Barrier(**gated), IsOk());
  ASSERT_THAT((*rank)->Barrier(**other), IsOk());
  EXPECT_THAT(device_->Synchronize(**other),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("order the streams")));
}

TEST_F(ShmCollectiveTest, RegionsThatDoNotFitAreRefused) {
  Start(3);
  char* region = exchange_.mapping().at<char>(0);
  const auto refused = StatusIs(absl::StatusCode::kInvalidArgument);
  const auto make = [&](void* data, size_t bytes, int rank, int world_size,
                        int64_t deadline_ns) {
    return NewShmCollective(*device_, data, bytes, rank, world_size, kStaging,
                            deadline_ns);
  };
  const size_t bytes = exchange_.bytes();
  EXPECT_THAT(make(nullptr, bytes, 0, 3, kHourNs), refused);
  EXPECT_THAT(make(region + 8, bytes, 0, 3, kHourNs), refused);
  EXPECT_THAT(make(region, bytes - 1, 0, 3, kHourNs), refused);
  EXPECT_THAT(make(region, bytes, 3, 3, kHourNs), refused);
  EXPECT_THAT(make(region, bytes, -1, 3, kHourNs), refused);
  EXPECT_THAT(make(region, bytes, 0, 0, kHourNs), refused);
  EXPECT_THAT(make(region, bytes, 0, 3, 0), refused);
}

TEST_F(ShmCollectiveTest, RanksOfAnotherJobAreRefused) {
  Start(3);
  ASSERT_THAT(Join(0, kHourNs), IsOk());
  char* region = exchange_.mapping().at<char>(0);
  EXPECT_THAT(NewShmCollective(*device_, region, exchange_.bytes(), 1, 2,
                               kStaging, kHourNs),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("world_size is 3")));
  EXPECT_THAT(NewShmCollective(*device_, region, exchange_.bytes(), 1, 3,
                               kStaging / 2, kHourNs),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("staging_bytes")));
  std::memset(region, 0xab, 8);
  EXPECT_THAT(Join(1, kHourNs), StatusIs(absl::StatusCode::kFailedPrecondition,
                                         HasSubstr("magic")));
}

TEST_F(ShmCollectiveTest, ASegmentServesOneLifeOfAJob) {
  Start(1);
  {
    const auto rank = Join(0, kHourNs);
    ASSERT_THAT(BarrierOf(**rank), IsOk());
  }
  EXPECT_THAT(Join(0, kHourNs), StatusIs(absl::StatusCode::kFailedPrecondition,
                                         HasSubstr("new segment")));
}

TEST(ExchangeBytesTest, GrowsWithRanksAndStagingAndIsWholePages) {
  static_assert(ExchangeBytes(1, 0) == kPageBytes);
  size_t last = 0;
  for (int world_size : {1, 2, 3, 8}) {
    const size_t bytes = ExchangeBytes(world_size, 100'001);
    EXPECT_EQ(bytes % kPageBytes, 0u);
    EXPECT_GE(bytes, last + 2 * 100'001);
    last = bytes;
  }
}

}  // namespace
}  // namespace slidedp::collective
