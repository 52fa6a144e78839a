// Memory, and arguments that make no sense.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/base/units.h"
#include "tests/contract/device_contract_test.h"

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

INSTANTIATE_TEST_SUITE_P(Backends, DeviceContract,
                         ::testing::ValuesIn(DeviceBackends()),
                         [](const auto& info) { return info.param.name; });

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

}  // namespace
}  // namespace slidedp::device
