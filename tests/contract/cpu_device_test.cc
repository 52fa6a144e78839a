// What only the CPU device has: host functions as commands, their errors, and
// a queue whose bound is ours to set.
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "common/device/device.h"
#include "tests/testing/status_matchers.h"

namespace slidedp::device {
namespace {

using ::testing::HasSubstr;
using testing::IsOk;
using ::testing::Not;
using testing::StatusIs;

class CpuDeviceTest : public ::testing::Test {
 protected:
  explicit CpuDeviceTest(size_t stream_capacity = 1024) {
    CpuOptions options;
    options.stream_capacity = stream_capacity;
    device_ = NewCpuDevice(options);
  }
  std::unique_ptr<Stream> NewStream(const std::string& name) {
    return *device_->NewStream(name);
  }
  std::unique_ptr<Event> NewEvent() { return *device_->NewEvent(); }
  static absl::Status Fail() { return absl::DataLossError("bad operand"); }

  std::unique_ptr<Device> device_;
  std::atomic<uint64_t> words_[8] = {};
};

TEST_F(CpuDeviceTest, DescribesItself) {
  EXPECT_EQ(device_->kind(), Kind::kCpu);
  EXPECT_THAT(device_->description(), HasSubstr("cpu ("));
}

TEST_F(CpuDeviceTest, TheFirstErrorStaysAndWhatFollowsIsSkipped) {
  auto stream = NewStream("compute");
  bool ran = false;
  ASSERT_THAT(EnqueueOnCpu(*stream, Fail), IsOk());
  ASSERT_THAT(EnqueueOnCpu(*stream,
                           [&] {
                             ran = true;
                             return absl::InternalError("second");
                           }),
              IsOk());
  ASSERT_THAT(device_->WriteWord(&words_[0], 1, *stream), IsOk());
  // A wait that would never end is skipped too.
  ASSERT_THAT(device_->WaitWord(&words_[1], 1, *stream), IsOk());
  for (int i = 0; i < 2; ++i) {
    EXPECT_THAT(device_->Synchronize(*stream),
                StatusIs(absl::StatusCode::kDataLoss,
                         HasSubstr("stream compute: bad operand")));
  }
  EXPECT_FALSE(ran);
  EXPECT_EQ(words_[0].load(), 0u);
  // For good.
  ASSERT_THAT(device_->WriteWord(&words_[0], 1, *stream), IsOk());
  EXPECT_THAT(device_->Synchronize(*stream),
              StatusIs(absl::StatusCode::kDataLoss));
  EXPECT_EQ(words_[0].load(), 0u);
}

TEST_F(CpuDeviceTest, AnErrorTravelsAlongEventsAndPublishesNothing) {
  auto compute = NewStream("compute"), drain = NewStream("drain"),
       apart = NewStream("apart");
  auto event = NewEvent();
  ASSERT_THAT(EnqueueOnCpu(*compute, Fail), IsOk());
  ASSERT_THAT(device_->Record(*event, *compute), IsOk());
  ASSERT_THAT(device_->Wait(*event, *drain), IsOk());
  ASSERT_THAT(device_->WriteWord(&words_[0], 1, *drain), IsOk());
  ASSERT_THAT(device_->WriteWord(&words_[1], 1, *apart), IsOk());
  EXPECT_THAT(device_->Synchronize(*drain),
              StatusIs(absl::StatusCode::kDataLoss,
                       HasSubstr("stream compute: bad operand")));
  EXPECT_EQ(words_[0].load(), 0u);
  EXPECT_THAT(device_->Synchronize(*event),
              StatusIs(absl::StatusCode::kDataLoss));
  EXPECT_THAT(device_->Synchronize(*apart), IsOk());
  EXPECT_EQ(words_[1].load(), 1u);
}

TEST_F(CpuDeviceTest, ARecordBeforeTheErrorCarriesNone) {
  auto compute = NewStream("compute"), other = NewStream("other");
  auto event = NewEvent();
  ASSERT_THAT(device_->Record(*event, *compute), IsOk());
  ASSERT_THAT(EnqueueOnCpu(*compute, Fail), IsOk());
  EXPECT_THAT(device_->Synchronize(*compute), Not(IsOk()));
  ASSERT_THAT(device_->Wait(*event, *other), IsOk());
  EXPECT_THAT(device_->Synchronize(*other), IsOk());
}

TEST_F(CpuDeviceTest, ADroppedRecordFreesItsWaitersWithAnError) {
  auto doomed = NewStream("doomed"), waiter = NewStream("waiter");
  auto event = NewEvent();
  ASSERT_THAT(device_->WaitWord(&words_[0], 1, *doomed), IsOk());
  ASSERT_THAT(device_->Record(*event, *doomed), IsOk());
  ASSERT_THAT(device_->Wait(*event, *waiter), IsOk());
  ASSERT_THAT(device_->WriteWord(&words_[1], 1, *waiter), IsOk());
  doomed.reset();
  EXPECT_THAT(device_->Synchronize(*waiter),
              StatusIs(absl::StatusCode::kCancelled));
  EXPECT_THAT(device_->Synchronize(*event),
              StatusIs(absl::StatusCode::kCancelled));
  EXPECT_THAT(device_->TimestampNs(*event),
              StatusIs(absl::StatusCode::kCancelled));
  EXPECT_EQ(words_[1].load(), 0u);
}

TEST_F(CpuDeviceTest, DestructionWaitsForTheRunningCommandAndDropsTheRest) {
  std::atomic<int> ran{0};
  auto stream = NewStream("s");
  ASSERT_THAT(EnqueueOnCpu(*stream,
                           [&] {
                             words_[0].store(1);
                             while (!CpuStreamIsClosing()) {
                               std::this_thread::yield();
                             }
                             ran.fetch_add(1);
                             return absl::OkStatus();
                           }),
              IsOk());
  ASSERT_THAT(EnqueueOnCpu(*stream,
                           [&] {
                             ran.fetch_add(100);
                             return absl::OkStatus();
                           }),
              IsOk());
  while (words_[0].load() == 0) std::this_thread::yield();
  stream.reset();
  EXPECT_EQ(ran.load(), 1);
  EXPECT_FALSE(CpuStreamIsClosing());
}

TEST_F(CpuDeviceTest, BadCommandsAndStreamsAreRefused) {
  class FakeStream : public Stream {
    absl::string_view name() const override { return "fake"; }
  };
  FakeStream fake;
  EXPECT_THAT(EnqueueOnCpu(fake, [] { return absl::OkStatus(); }),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("fake")));
  auto stream = NewStream("s");
  EXPECT_THAT(EnqueueOnCpu(*stream, nullptr),
              StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST_F(CpuDeviceTest, ACommandsCapturesAreFreedOnceItHasRun) {
  auto stream = NewStream("s");
  auto owned = std::make_shared<int>(1);
  ASSERT_THAT(EnqueueOnCpu(*stream, [owned] { return absl::OkStatus(); }),
              IsOk());
  ASSERT_THAT(device_->Synchronize(*stream), IsOk());
  EXPECT_EQ(owned.use_count(), 1);
}

class SmallQueueTest : public CpuDeviceTest {
 protected:
  static constexpr uint64_t kCapacity = 3;
  SmallQueueTest() : CpuDeviceTest(kCapacity) {}
};

TEST_F(SmallQueueTest, AFullStreamBlocksItsProducer) {
  constexpr uint64_t kCommands = 20;
  auto stream = NewStream("s");
  std::atomic<uint64_t> enqueued{0};
  std::atomic<uint64_t> ran{0};
  ASSERT_THAT(device_->WaitWord(&words_[0], 1, *stream), IsOk());
  std::thread producer([&] {
    for (uint64_t i = 0; i < kCommands; ++i) {
      ASSERT_THAT(EnqueueOnCpu(*stream,
                               [&] {
                                 ran.fetch_add(1);
                                 return absl::OkStatus();
                               }),
                  IsOk());
      enqueued.fetch_add(1);
    }
  });
  // The wait may still be in the queue, so one less than kCapacity fits; it may
  // be running, then kCapacity fits; never more.
  while (enqueued.load() < kCapacity - 1) std::this_thread::yield();
  for (int i = 0; i < 1000; ++i) {
    std::this_thread::yield();
    ASSERT_LE(enqueued.load(), kCapacity);
  }
  EXPECT_EQ(ran.load(), 0u);
  words_[0].store(1, std::memory_order_release);
  producer.join();
  ASSERT_THAT(device_->Synchronize(*stream), IsOk());
  EXPECT_EQ(ran.load(), kCommands);
}

TEST_F(SmallQueueTest, SynchronizeFromAnotherThreadSeesWhatWasEnqueued) {
  auto stream = NewStream("s");
  std::vector<int> values;
  for (int i = 0; i < 200; ++i) {
    ASSERT_THAT(EnqueueOnCpu(*stream,
                             [&values, i] {
                               values.push_back(i);
                               return absl::OkStatus();
                             }),
                IsOk());
    if (i % 50 == 0) {
      std::thread([&] {
        EXPECT_THAT(device_->Synchronize(*stream), IsOk());
        EXPECT_EQ(values.size(), static_cast<size_t>(i) + 1);
      }).join();
    }
  }
  ASSERT_THAT(device_->Synchronize(*stream), IsOk());
  for (int i = 0; i < 200; ++i) ASSERT_EQ(values[i], i);
}

TEST(CpuDeviceDeathTest, AQueueHoldsAtLeastOneCommand) {
  CpuOptions options;
  options.stream_capacity = 0;
  EXPECT_DEATH(NewCpuDevice(options), "at least one command");
}

}  // namespace
}  // namespace slidedp::device
