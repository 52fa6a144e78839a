// Events: order between streams, and time.
#include <algorithm>
#include <memory>
#include <thread>

#include "tests/contract/device_contract_test.h"

namespace slidedp::device {
namespace {

using testing::IsOk;
using testing::StatusIs;

TEST_P(DeviceContract, AnEventNeverRecordedHoldsNothingUp) {
  auto stream = NewStream("s");
  auto event = NewEvent();
  ASSERT_THAT(device_->Wait(*event, *stream), IsOk());
  EXPECT_THAT(device_->Synchronize(*stream), IsOk());
  EXPECT_THAT(device_->Synchronize(*event), IsOk());
  EXPECT_THAT(device_->TimestampNs(*event),
              StatusIs(absl::StatusCode::kFailedPrecondition));
}

TEST_P(DeviceContract, AnEventOrdersTwoStreams) {
  auto a = NewStream("a"), b = NewStream("b");
  auto event = NewEvent();
  Buffer data = OnDevice(8), out = Host(8), in = Host(8);
  *in.as<uint64_t>() = 77;
  ASSERT_THAT(device_->WaitWord(word(0), 1, *a), IsOk());
  ASSERT_THAT(device_->Copy(data.data(), in.data(), 8, *a), IsOk());
  ASSERT_THAT(device_->Record(*event, *a), IsOk());
  ASSERT_THAT(device_->Wait(*event, *b), IsOk());
  ASSERT_THAT(device_->Copy(out.data(), data.data(), 8, *b), IsOk());
  word(0)->store(1, std::memory_order_release);
  ASSERT_THAT(device_->Synchronize(*b), IsOk());
  EXPECT_EQ(*out.as<uint64_t>(), 77u);
}

TEST_P(DeviceContract, AWaitKeepsTheRecordItWasEnqueuedFor) {
  auto a = NewStream("a"), b = NewStream("b");
  auto event = NewEvent();
  ASSERT_THAT(device_->Record(*event, *a), IsOk());
  ASSERT_THAT(device_->Wait(*event, *b), IsOk());
  // Recorded again, behind a gate that stays shut: no business of b.
  ASSERT_THAT(device_->WaitWord(word(0), 1, *a), IsOk());
  ASSERT_THAT(device_->Record(*event, *a), IsOk());
  ASSERT_THAT(device_->Synchronize(*b), IsOk());
  // A later wait does mean the later record.
  ASSERT_THAT(device_->Wait(*event, *b), IsOk());
  ASSERT_THAT(device_->WriteWord(word(1), 1, *b), IsOk());
  EXPECT_EQ(word(1)->load(), 0u);
  word(0)->store(1, std::memory_order_release);
  ASSERT_THAT(device_->Synchronize(*b), IsOk());
  EXPECT_EQ(word(1)->load(), 1u);
}

TEST_P(DeviceContract, ARecordElsewhereDoesNotReleaseAnEarlierWait) {
  auto a = NewStream("a"), b = NewStream("b"), c = NewStream("c");
  auto event = NewEvent();
  ASSERT_THAT(device_->WaitWord(word(0), 1, *a), IsOk());
  ASSERT_THAT(device_->Record(*event, *a), IsOk());
  ASSERT_THAT(device_->Wait(*event, *b), IsOk());
  ASSERT_THAT(device_->WriteWord(word(1), 1, *b), IsOk());
  ASSERT_THAT(device_->Record(*event, *c), IsOk());
  ASSERT_THAT(device_->Synchronize(*event), IsOk());  // c's
  EXPECT_EQ(word(1)->load(), 0u);
  word(0)->store(1, std::memory_order_release);
  ASSERT_THAT(device_->Synchronize(*b), IsOk());
}

TEST_P(DeviceContract, TimestampsFollowTheOrderOfTheStream) {
  auto stream = NewStream("s");
  auto first = NewEvent(), second = NewEvent();
  ASSERT_THAT(device_->Record(*first, *stream), IsOk());
  ASSERT_THAT(device_->WaitWord(word(0), 1, *stream), IsOk());
  ASSERT_THAT(device_->Record(*second, *stream), IsOk());
  ASSERT_THAT(device_->Synchronize(*first), IsOk());
  EXPECT_THAT(device_->TimestampNs(*second),
              StatusIs(absl::StatusCode::kFailedPrecondition));
  word(0)->store(1, std::memory_order_release);
  ASSERT_THAT(device_->Synchronize(*second), IsOk());
  EXPECT_LE(*device_->TimestampNs(*first), *device_->TimestampNs(*second));
}

// Layers slide through two slots: deliver -> compute -> drain, with slots given
// back by events and backpressure by words, as in a step.
TEST_P(DeviceContract, ThreeStreamsPipelineThroughTwoSlots) {
  constexpr uint64_t kUnits = 150;
  constexpr size_t kCount = 513;
  constexpr size_t kBytes = kCount * 8;
  Buffer source = Host(kUnits * kBytes), result = Host(2 * kBytes);
  for (uint64_t u = 0; u < kUnits; ++u) {
    std::fill_n(source.as<uint64_t>() + u * kCount, kCount, u + 1);
  }
  Buffer slots[2] = {OnDevice(kBytes), OnDevice(kBytes)};
  Buffer outs[2] = {OnDevice(kBytes), OnDevice(kBytes)};
  auto deliver = NewStream("deliver"), compute = NewStream("compute"),
       drain = NewStream("drain");
  std::unique_ptr<Event> full[2] = {NewEvent(), NewEvent()};
  std::unique_ptr<Event> empty[2] = {NewEvent(), NewEvent()};
  std::unique_ptr<Event> made[2] = {NewEvent(), NewEvent()};
  std::unique_ptr<Event> drained[2] = {NewEvent(), NewEvent()};
  std::thread consumer([&] {
    for (uint64_t u = 0; u < kUnits; ++u) {
      AwaitWord(*word(1), u + 1);
      const uint64_t* got = result.as<uint64_t>() + (u % 2) * kCount;
      for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(got[i], u + 1);
      word(2)->store(u + 1, std::memory_order_release);
    }
  });
  for (uint64_t u = 0; u < kUnits; ++u) {
    const size_t s = u % 2;
    ASSERT_THAT(device_->Wait(*empty[s], *deliver), IsOk());
    ASSERT_THAT(device_->WaitWord(word(0), u + 1, *deliver), IsOk());
    ASSERT_THAT(
        device_->Copy(slots[s].data(), source.as<uint64_t>() + u * kCount,
                      kBytes, *deliver),
        IsOk());
    ASSERT_THAT(device_->Record(*full[s], *deliver), IsOk());

    ASSERT_THAT(device_->Wait(*full[s], *compute), IsOk());
    ASSERT_THAT(device_->Wait(*drained[s], *compute), IsOk());
    ASSERT_THAT(
        device_->Copy(outs[s].data(), slots[s].data(), kBytes, *compute),
        IsOk());
    ASSERT_THAT(device_->FillZero(slots[s].data(), kBytes, *compute), IsOk());
    ASSERT_THAT(device_->Record(*empty[s], *compute), IsOk());
    ASSERT_THAT(device_->Record(*made[s], *compute), IsOk());

    ASSERT_THAT(device_->Wait(*made[s], *drain), IsOk());
    ASSERT_THAT(device_->WaitWord(word(2), u < 2 ? 0 : u - 1, *drain), IsOk());
    ASSERT_THAT(device_->Copy(result.as<uint64_t>() + s * kCount,
                              outs[s].data(), kBytes, *drain),
                IsOk());
    ASSERT_THAT(device_->Record(*drained[s], *drain), IsOk());
    ASSERT_THAT(device_->WriteWord(word(1), u + 1, *drain), IsOk());
    word(0)->store(u + 1, std::memory_order_release);
  }
  consumer.join();
  EXPECT_THAT(device_->Synchronize(*deliver), IsOk());
  EXPECT_THAT(device_->Synchronize(*compute), IsOk());
  EXPECT_THAT(device_->Synchronize(*drain), IsOk());
}

}  // namespace
}  // namespace slidedp::device
