// The contract of device::Device, run on every backend that a binary links
// (device_backends.h).
#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/units.h"
#include "common/device/device.h"
#include "common/shm/segment.h"
#include "tests/contract/device_backends.h"
#include "tests/testing/random.h"
#include "tests/testing/status_matchers.h"

namespace slidedp::device {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;

class FakeStream : public Stream {
 public:
  absl::string_view name() const override { return "fake"; }
};
class FakeEvent : public Event {};

class DeviceContract : public ::testing::TestWithParam<DeviceBackend> {
 protected:
  DeviceContract() : device_(GetParam().make()) {
    words_buffer_ = Host(64 * sizeof(std::atomic<uint64_t>));
  }

  std::unique_ptr<Stream> NewStream(const std::string& name) {
    auto stream = device_->NewStream(name);
    EXPECT_THAT(stream, IsOk());
    return *std::move(stream);
  }
  std::unique_ptr<Event> NewEvent() {
    auto event = device_->NewEvent();
    EXPECT_THAT(event, IsOk());
    return *std::move(event);
  }
  Buffer Allocated(size_t bytes, Memory where) {
    auto buffer = device_->Allocate("test buffer", bytes, where);
    EXPECT_THAT(buffer, IsOk());
    return *std::move(buffer);
  }
  Buffer Host(size_t bytes) { return Allocated(bytes, Memory::kPinnedHost); }
  Buffer OnDevice(size_t bytes) { return Allocated(bytes, Memory::kDevice); }
  // Zero at first.
  std::atomic<uint64_t>* word(size_t i) {
    return words_buffer_.as<std::atomic<uint64_t>>() + i;
  }

  // Streams are made by the tests, so they go before these.
  std::unique_ptr<Device> device_;
  Buffer words_buffer_;
};

INSTANTIATE_TEST_SUITE_P(Backends, DeviceContract,
                         ::testing::ValuesIn(DeviceBackends()),
                         [](const auto& info) { return info.param.name; });

void AwaitWord(const std::atomic<uint64_t>& word, uint64_t at_least) {
  while (word.load(std::memory_order_acquire) < at_least) {
    std::this_thread::yield();
  }
}

TEST_P(DeviceContract, AllocationsAreZeroAlignedAndCounted) {
  const size_t before = device_->allocated_bytes();
  {
    for (size_t bytes : {size_t{1}, size_t{4097}, size_t{3 * kMiB + 5}}) {
      Buffer host = Host(bytes);
      EXPECT_EQ(host.bytes(), bytes);
      EXPECT_EQ(device_->allocated_bytes(), before + bytes);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(host.data()) % 256, 0u);
      EXPECT_TRUE(std::all_of(host.as<char>(), host.as<char>() + bytes,
                              [](char c) { return c == 0; }));
      Buffer moved = std::move(host);
      EXPECT_EQ(device_->allocated_bytes(), before + bytes);
    }
  }
  EXPECT_EQ(device_->allocated_bytes(), before);
  Buffer none = OnDevice(0);
  EXPECT_EQ(none.bytes(), 0u);
  EXPECT_EQ(device_->allocated_bytes(), before);
}

TEST_P(DeviceContract, DeviceMemoryIsZeroToo) {
  auto stream = NewStream("copy");
  Buffer device_memory = OnDevice(12345);
  Buffer host = Host(12345);
  std::memset(host.data(), 7, host.bytes());
  ASSERT_THAT(device_->Copy(host.data(), device_memory.data(), 12345, *stream),
              IsOk());
  ASSERT_THAT(device_->Synchronize(*stream), IsOk());
  EXPECT_TRUE(std::all_of(host.as<char>(), host.as<char>() + 12345,
                          [](char c) { return c == 0; }));
}

TEST_P(DeviceContract, OutOfMemoryNamesTheAllocationAndBytes) {
  Buffer held = Host(1000);
  for (size_t bytes : {size_t{1} << 45, size_t{1} << 60}) {
    EXPECT_THAT(device_->Allocate("window slot 3", bytes, Memory::kDevice),
                StatusIs(absl::StatusCode::kResourceExhausted,
                         AllOf(HasSubstr("window slot 3"),
                               HasSubstr(absl::StrCat(bytes)))));
  }
}

TEST_P(DeviceContract, ABufferMayOutliveItsDevice) {
  Buffer buffer = Host(100);
  words_buffer_ = Buffer();
  device_.reset();
  buffer.as<char>()[99] = 1;
}

TEST_P(DeviceContract, AStreamRunsItsCopiesInOrder) {
  auto stream = NewStream("copy");
  constexpr size_t kBytes = 100'003;
  Buffer source = Host(kBytes), result = Host(kBytes);
  Buffer a = OnDevice(kBytes), b = OnDevice(kBytes);
  testing::Random random(1);
  for (size_t i = 0; i < kBytes; ++i) {
    source.as<uint8_t>()[i] = static_cast<uint8_t>(random.Next());
  }
  // Each command undoes or uses the one before; any other order shows.
  ASSERT_THAT(device_->Copy(a.data(), source.data(), kBytes, *stream), IsOk());
  ASSERT_THAT(device_->Copy(b.data(), a.data(), kBytes, *stream), IsOk());
  ASSERT_THAT(device_->FillZero(a.data(), kBytes, *stream), IsOk());
  ASSERT_THAT(device_->FillZero(b.as<char>() + 77, 1001, *stream), IsOk());
  ASSERT_THAT(device_->Copy(a.as<char>() + 1, b.data(), kBytes - 1, *stream),
              IsOk());
  ASSERT_THAT(device_->Copy(result.data(), a.data(), kBytes, *stream), IsOk());
  ASSERT_THAT(device_->Copy(result.data(), a.data(), 0, *stream), IsOk());
  ASSERT_THAT(device_->Synchronize(*stream), IsOk());

  std::vector<uint8_t> want(source.as<uint8_t>(),
                            source.as<uint8_t>() + kBytes);
  std::fill(want.begin() + 77, want.begin() + 77 + 1001, 0);
  want.insert(want.begin(), 0);
  want.pop_back();
  EXPECT_EQ(std::memcmp(result.data(), want.data(), kBytes), 0);
}

TEST_P(DeviceContract, AStreamThatWaitsBlocksNoOther) {
  auto waiting = NewStream("waiting");
  std::vector<std::unique_ptr<Stream>> others;
  ASSERT_THAT(device_->WaitWord(word(0), 1, *waiting), IsOk());
  ASSERT_THAT(device_->WriteWord(word(1), 1, *waiting), IsOk());
  for (int i = 0; i < 8; ++i) {
    others.push_back(NewStream(absl::StrCat("other ", i)));
    ASSERT_THAT(device_->WriteWord(word(2 + i), 1, *others.back()), IsOk());
    ASSERT_THAT(device_->Synchronize(*others.back()), IsOk());
    EXPECT_EQ(word(2 + i)->load(), 1u);
  }
  EXPECT_EQ(word(1)->load(), 0u);
  word(0)->store(1, std::memory_order_release);
  ASSERT_THAT(device_->Synchronize(*waiting), IsOk());
  EXPECT_EQ(word(1)->load(), 1u);
}

TEST_P(DeviceContract, AWordWaitIsGreaterOrEqual) {
  auto stream = NewStream("s");
  word(0)->store(10);
  ASSERT_THAT(device_->WaitWord(word(0), 0, *stream), IsOk());
  ASSERT_THAT(device_->WaitWord(word(0), 9, *stream), IsOk());
  ASSERT_THAT(device_->WaitWord(word(0), 10, *stream), IsOk());
  ASSERT_THAT(device_->Synchronize(*stream), IsOk());
  ASSERT_THAT(device_->WaitWord(word(0), 11, *stream), IsOk());
  ASSERT_THAT(device_->WriteWord(word(1), 1, *stream), IsOk());
  word(0)->store(uint64_t{1} << 63, std::memory_order_release);
  ASSERT_THAT(device_->Synchronize(*stream), IsOk());
  EXPECT_EQ(word(1)->load(), 1u);
}

TEST_P(DeviceContract, WhoSeesTheWordSeesWhatCameBefore) {
  // Host -> stream -> host, with plain data on both sides.
  constexpr uint64_t kRounds = 300;
  constexpr size_t kCount = 1001;
  auto stream = NewStream("echo");
  Buffer in = Host(kCount * 8), middle = OnDevice(kCount * 8),
         out = Host(kCount * 8);
  std::thread host([&] {
    for (uint64_t round = 1; round <= kRounds; ++round) {
      std::fill_n(in.as<uint64_t>(), kCount, round);
      word(0)->store(round, std::memory_order_release);
      AwaitWord(*word(1), round);
      for (size_t i = 0; i < kCount; ++i) {
        ASSERT_EQ(out.as<uint64_t>()[i], round);
      }
    }
  });
  for (uint64_t round = 1; round <= kRounds; ++round) {
    ASSERT_THAT(device_->WaitWord(word(0), round, *stream), IsOk());
    ASSERT_THAT(device_->Copy(middle.data(), in.data(), kCount * 8, *stream),
                IsOk());
    ASSERT_THAT(device_->Copy(out.data(), middle.data(), kCount * 8, *stream),
                IsOk());
    ASSERT_THAT(device_->WriteWord(word(1), round, *stream), IsOk());
  }
  host.join();
  EXPECT_THAT(device_->Synchronize(*stream), IsOk());
}

TEST_P(DeviceContract, AStreamWaitsOnAWordThatItCanOnlyRead) {
  const auto segment =
      shm::Segment::Create(shm::SegmentKind::kVersions, kPageBytes, "test");
  ASSERT_THAT(segment, IsOk());
  const auto fd = segment->WorkerFd();
  ASSERT_THAT(fd, IsOk());
  const auto mapping = shm::Mapping::Map(fd->get(), kPageBytes,
                                         shm::Access::kReadOnly, "versions");
  ASSERT_THAT(mapping, IsOk());
  const auto registration =
      device_->RegisterHost(mapping->data(), kPageBytes, /*read_only=*/true);
  ASSERT_THAT(registration, IsOk());
  auto stream = NewStream("deliver");
  Buffer host = Host(64), data = OnDevice(64);
  ASSERT_THAT(
      device_->WaitWord(mapping->at<std::atomic<uint64_t>>(128), 5, *stream),
      IsOk());
  ASSERT_THAT(device_->Copy(data.data(), mapping->at<char>(64), 64, *stream),
              IsOk());
  ASSERT_THAT(device_->Copy(host.data(), data.data(), 64, *stream), IsOk());
  std::memset(segment->mapping().at<char>(64), 3, 64);
  segment->mapping().at<std::atomic<uint64_t>>(128)->store(
      5, std::memory_order_release);
  ASSERT_THAT(device_->Synchronize(*stream), IsOk());
  EXPECT_EQ(host.as<char>()[63], 3);
}

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

TEST_P(DeviceContract, DestroyingAStreamDropsAPendingWordWait) {
  if (device_->kind() == Kind::kCuda) {
    GTEST_SKIP() << "a CUDA stream can't drop a wait (cuda_device.h)";
  }
  auto stream = NewStream("s");
  ASSERT_THAT(device_->WaitWord(word(0), 1, *stream), IsOk());
  ASSERT_THAT(device_->WriteWord(word(1), 1, *stream), IsOk());
  stream.reset();
  EXPECT_EQ(word(1)->load(), 0u);
}

TEST_P(DeviceContract, DestroyingAStreamDropsAPendingEventWait) {
  if (device_->kind() == Kind::kCuda) {
    GTEST_SKIP() << "a CUDA stream can't drop a wait (cuda_device.h)";
  }
  auto stuck = NewStream("stuck"), stream = NewStream("s");
  auto event = NewEvent();
  ASSERT_THAT(device_->WaitWord(word(0), 1, *stuck), IsOk());
  ASSERT_THAT(device_->Record(*event, *stuck), IsOk());
  ASSERT_THAT(device_->Wait(*event, *stream), IsOk());
  ASSERT_THAT(device_->WriteWord(word(1), 1, *stream), IsOk());
  stream.reset();
  EXPECT_EQ(word(1)->load(), 0u);
}

TEST_P(DeviceContract, BadArgumentsAreRefusedAtTheCall) {
  auto stream = NewStream("s");
  Buffer host = Host(64);
  const auto refused = StatusIs(absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(device_->Copy(nullptr, host.data(), 8, *stream), refused);
  EXPECT_THAT(device_->Copy(host.data(), nullptr, 8, *stream), refused);
  EXPECT_THAT(device_->FillZero(nullptr, 8, *stream), refused);
  EXPECT_THAT(device_->WaitWord(nullptr, 1, *stream), refused);
  EXPECT_THAT(device_->WriteWord(nullptr, 1, *stream), refused);
  auto* odd = reinterpret_cast<std::atomic<uint64_t>*>(host.as<char>() + 4);
  EXPECT_THAT(device_->WaitWord(odd, 1, *stream), refused);
  EXPECT_THAT(device_->RegisterHost(nullptr, 8, false), refused);
  EXPECT_THAT(device_->RegisterHost(host.data(), 0, false), refused);
  EXPECT_THAT(device_->Synchronize(*stream), IsOk());
}

TEST_P(DeviceContract, StreamsAndEventsOfAnotherKindAreRefused) {
  auto stream = NewStream("s");
  auto event = NewEvent();
  FakeStream fake_stream;
  FakeEvent fake_event;
  const auto refused = StatusIs(absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(device_->Record(fake_event, *stream), refused);
  EXPECT_THAT(device_->Record(*event, fake_stream), refused);
  EXPECT_THAT(device_->Wait(fake_event, *stream), refused);
  EXPECT_THAT(device_->Wait(*event, fake_stream), refused);
  EXPECT_THAT(device_->Synchronize(fake_event), refused);
  EXPECT_THAT(device_->Synchronize(fake_stream), refused);
  EXPECT_THAT(device_->TimestampNs(fake_event), refused);
  EXPECT_THAT(device_->WriteWord(word(0), 1, fake_stream), refused);
  EXPECT_THAT(device_->FillZero(words_buffer_.data(), 8, fake_stream), refused);
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
