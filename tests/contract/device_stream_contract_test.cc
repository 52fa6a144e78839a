// Order within a stream, words, and streams that wait.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/units.h"
#include "common/shm/segment.h"
#include "tests/contract/device_contract_test.h"
#include "tests/testing/random.h"

namespace slidedp::device {
namespace {

using testing::IsOk;

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

}  // namespace
}  // namespace slidedp::device
