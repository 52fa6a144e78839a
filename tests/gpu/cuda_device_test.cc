// What only the CUDA device has; the contract itself is
// tests/contract/device_*_contract_test.cc, in the same binary.
#include "common/device/cuda_device.h"

#include <cuda_runtime_api.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "common/base/clock.h"
#include "common/base/units.h"
#include "common/device/accelerator.h"
#include "common/device/cuda_status.h"
#include "common/device/cuda_stream.h"
#include "common/shm/segment.h"
#include "tests/gpu/child.h"
#include "tests/testing/status_matchers.h"

namespace slidedp::device {
namespace {

using ::testing::AllOf;
using testing::AwaitChild;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::SpawnTest;
using testing::StatusIs;

using Word = std::atomic<uint64_t>;

class CudaDeviceTest : public ::testing::Test {
 protected:
  void SetUp() override { Renew({}); }
  void Renew(const CudaOptions& options) {
    device_.reset();
    ASSERT_OK_AND_ASSIGN(device_, NewCudaDevice(options));
  }
  std::unique_ptr<Stream> NewStream(const std::string& name) {
    return *device_->NewStream(name);
  }
  Buffer Pinned(size_t bytes) {
    return *device_->Allocate("pinned", bytes, Memory::kPinnedHost);
  }
  Buffer OnDevice(size_t bytes) {
    return *device_->Allocate("device", bytes, Memory::kDevice);
  }

  std::unique_ptr<Device> device_;
};

TEST_F(CudaDeviceTest, DescribesItself) {
  EXPECT_EQ(device_->kind(), Kind::kCuda);
  EXPECT_THAT(device_->description(), HasSubstr("(sm_"));
  const auto properties = QueryCudaProperties(*device_);
  ASSERT_OK(properties);
  EXPECT_GT(properties->multiprocessors, 0);
}

TEST_F(CudaDeviceTest, AGpuThatIsNotThereIsRefused) {
  CudaOptions options;
  options.index = 1000;
  EXPECT_THAT(NewCudaDevice(options),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("CUDA_VISIBLE_DEVICES")));
  AcceleratorOptions accelerator;
  accelerator.rank = 1'000'000;
  const auto count = CudaDeviceCount();
  ASSERT_OK(count);
  // With one GPU visible, whatever the rank, that is the one.
  EXPECT_EQ(NewAccelerator(accelerator).ok(), *count == 1);
}

TEST_F(CudaDeviceTest, OutOfDeviceMemorySaysWhatIsLeft) {
  Buffer held = OnDevice(3 * kMiB);
  EXPECT_THAT(
      device_->Allocate("gradient.decoder.1", size_t{1} << 44, Memory::kDevice),
      StatusIs(absl::StatusCode::kResourceExhausted,
               AllOf(HasSubstr("gradient.decoder.1"), HasSubstr("sm_"),
                     HasSubstr("are free"), HasSubstr("holds 3.00 MiB"))));
  // The failure is over: nothing of it shows later.
  EXPECT_OK(device_->Allocate("small", 100, Memory::kDevice));
}

TEST_F(CudaDeviceTest, HostMemoryThatCantBePinnedIsToldFromGpuMemory) {
  // Reserved, but not backed by anything that could be pinned.
  void* hole =
      mmap(nullptr, kPageBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(hole, MAP_FAILED);
  const auto registration = device_->RegisterHost(hole, kPageBytes, false);
  ASSERT_FALSE(registration.ok());
  EXPECT_THAT(std::string(registration.status().message()),
              AllOf(HasSubstr("4096 bytes"), HasSubstr("host memory"),
                    HasSubstr("RLIMIT_MEMLOCK")));
  munmap(hole, kPageBytes);
}

TEST_F(CudaDeviceTest, CopiesRunAcrossPiecesOfARegistration) {
  CudaOptions options;
  options.registration_piece_bytes = 2 * kPageBytes;
  Renew(options);
  constexpr size_t kBytes = 7 * kPageBytes;
  const auto segment =
      shm::Segment::Create(shm::SegmentKind::kGrads, kBytes, "test");
  ASSERT_OK(segment);
  auto* host = segment->mapping().at<uint8_t>(0);
  for (size_t i = 0; i < kBytes; ++i) host[i] = static_cast<uint8_t>(i % 251);
  const auto registration = device_->RegisterHost(host, kBytes, false);
  ASSERT_OK(registration);
  auto stream = NewStream("copy");
  Buffer device_memory = OnDevice(kBytes), back = Pinned(kBytes);
  // Neither end of the copy is at a piece's end.
  ASSERT_OK(
      device_->Copy(device_memory.data(), host + 100, kBytes - 200, *stream));
  ASSERT_OK(
      device_->Copy(back.data(), device_memory.data(), kBytes - 200, *stream));
  ASSERT_OK(device_->Synchronize(*stream));
  EXPECT_EQ(std::memcmp(back.data(), host + 100, kBytes - 200), 0);
  // A word of the last piece.
  auto* word = new (host + 6 * kPageBytes + 8) Word(0);
  ASSERT_OK(device_->WriteWord(word, 7, *stream));
  ASSERT_OK(device_->Synchronize(*stream));
  EXPECT_EQ(word->load(), 7u);
}

TEST_F(CudaDeviceTest, WordsMustBeInMemoryThatTheDeviceKnows) {
  auto stream = NewStream("s");
  const auto refused = StatusIs(absl::StatusCode::kInvalidArgument,
                                HasSubstr("registered or pinned"));
  Word elsewhere{0};
  EXPECT_THAT(device_->WaitWord(&elsewhere, 1, *stream), refused);
  EXPECT_THAT(device_->WriteWord(&elsewhere, 1, *stream), refused);
  Buffer device_memory = OnDevice(64);
  EXPECT_THAT(device_->WaitWord(device_memory.as<Word>(), 1, *stream), refused);

  const auto segment =
      shm::Segment::Create(shm::SegmentKind::kReports, 2 * kPageBytes, "test");
  ASSERT_OK(segment);
  auto* first = segment->mapping().at<Word>(0);
  auto* second = segment->mapping().at<Word>(kPageBytes);
  {
    const auto registration =
        device_->RegisterHost(first, kPageBytes, /*read_only=*/false);
    ASSERT_OK(registration);
    EXPECT_OK(device_->WriteWord(first, 1, *stream));
    EXPECT_THAT(device_->WriteWord(second, 1, *stream), refused);
    ASSERT_OK(device_->Synchronize(*stream));
  }
  EXPECT_EQ(first->load(), 1u);
  EXPECT_THAT(device_->WriteWord(first, 2, *stream), refused);
}

TEST_F(CudaDeviceTest, MemoryRegisteredReadOnlyIsNeverWritten) {
  const auto segment =
      shm::Segment::Create(shm::SegmentKind::kVersions, kPageBytes, "test");
  ASSERT_OK(segment);
  const auto fd = segment->WorkerFd();
  ASSERT_OK(fd);
  const auto mapping = shm::Mapping::Map(fd->get(), kPageBytes,
                                         shm::Access::kReadOnly, "versions");
  ASSERT_OK(mapping);
  // Without the flag the driver would need to write.
  EXPECT_FALSE(device_->RegisterHost(mapping->data(), kPageBytes, false).ok());
  const auto registration =
      device_->RegisterHost(mapping->data(), kPageBytes, true);
  ASSERT_OK(registration);
  auto stream = NewStream("s");
  Buffer device_memory = OnDevice(64);
  const auto refused =
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("read-only"));
  EXPECT_THAT(device_->WriteWord(mapping->at<Word>(0), 1, *stream), refused);
  EXPECT_THAT(device_->FillZero(mapping->data(), 64, *stream), refused);
  EXPECT_THAT(device_->Copy(mapping->data(), device_memory.data(), 64, *stream),
              refused);
}

TEST_F(CudaDeviceTest, AStreamHoldsHundredsOfPendingCommands) {
  Buffer words = Pinned(kPageBytes);
  auto* gate = words.as<Word>();
  auto stream = NewStream("s");
  constexpr uint64_t kCommands = 600;
  ASSERT_OK(device_->WaitWord(gate, 1, *stream));
  for (uint64_t i = 1; i <= kCommands; ++i) {
    ASSERT_OK(device_->WriteWord(gate + 1, i, *stream));
  }
  EXPECT_EQ(gate[1].load(), 0u);
  gate->store(1, std::memory_order_release);
  ASSERT_OK(device_->Synchronize(*stream));
  EXPECT_EQ(gate[1].load(), kCommands);
}

TEST_F(CudaDeviceTest, StreamsOfAWorkerDoNotHoldUpEachOther) {
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < 16; ++i) {
    streams.push_back(NewStream(absl::StrCat("stream ", i)));
  }
  EXPECT_OK(CheckStreamIndependence(*device_, 2'000'000'000));
  EXPECT_OK(CheckAcceleratorStreams(*device_));
}

// In a child, because the setting is read once.
TEST_F(CudaDeviceTest, StreamsThatShareAChannelAreFound) {
  EXPECT_EQ(
      AwaitChild(SpawnTest("CudaDeviceChild.DISABLED_FindsSharedChannels", {})),
      0);
}

TEST(CudaDeviceChild, DISABLED_FindsSharedChannels) {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
  ASSERT_OK_AND_ASSIGN(auto device, NewCudaDevice({}));
  std::vector<std::unique_ptr<Stream>> streams;
  for (int i = 0; i < 8; ++i) {
    streams.push_back(*device->NewStream(absl::StrCat("stream ", i)));
  }
  EXPECT_THAT(CheckStreamIndependence(*device, 200'000'000),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("holds up"),
                             HasSubstr("CUDA_DEVICE_MAX_CONNECTIONS"))));
}

TEST_F(CudaDeviceTest, EventTimesAreOnTheHostsClock) {
  constexpr int64_t kToleranceNs = 1'000'000;
  auto stream = NewStream("s");
  Buffer memory = OnDevice(kMiB);
  int64_t last_ns = 0;
  for (int i = 0; i < 20; ++i) {
    const auto event = *device_->NewEvent();
    const int64_t before_ns = MonotonicNs();
    ASSERT_OK(device_->FillZero(memory.data(), memory.bytes(), *stream));
    ASSERT_OK(device_->Record(*event, *stream));
    ASSERT_OK(device_->Synchronize(*event));
    const int64_t after_ns = MonotonicNs();
    const auto time_ns = device_->TimestampNs(*event);
    ASSERT_OK(time_ns);
    EXPECT_GE(*time_ns, before_ns - kToleranceNs);
    EXPECT_LE(*time_ns, after_ns + kToleranceNs);
    EXPECT_GE(*time_ns, last_ns);
    last_ns = *time_ns;
  }
}

TEST_F(CudaDeviceTest, ThreadsMayUseTheDeviceWithoutChoosingIt) {
  Buffer words = Pinned(kPageBytes);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      auto stream = NewStream(absl::StrCat("thread ", i));
      Buffer memory = OnDevice(1000);
      ASSERT_OK(device_->FillZero(memory.data(), 1000, *stream));
      ASSERT_OK(device_->WriteWord(words.as<Word>() + i, i + 1, *stream));
      ASSERT_OK(device_->Synchronize(*stream));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(words.as<Word>()[i].load(), static_cast<uint64_t>(i + 1));
  }
}

// The daemon's side is this process, the worker's a child that maps the words
// it reads read-only.
constexpr uint64_t kRounds = 200;
constexpr size_t kPayload = 1000;  // uint64

TEST_F(CudaDeviceTest, ProcessesMeetThroughWords) {
  const auto params =
      shm::Segment::Create(shm::SegmentKind::kParams, kPayload * 8, "test");
  const auto versions =
      shm::Segment::Create(shm::SegmentKind::kVersions, kPageBytes, "test");
  const auto reports = shm::Segment::Create(shm::SegmentKind::kReports,
                                            kPageBytes + kPayload * 8, "test");
  ASSERT_OK(params);
  ASSERT_OK(versions);
  ASSERT_OK(reports);
  const auto params_fd = params->WorkerFd();
  const auto versions_fd = versions->WorkerFd();
  const auto reports_fd = reports->WorkerFd();
  ASSERT_OK(params_fd);
  ASSERT_OK(versions_fd);
  ASSERT_OK(reports_fd);
  const int child =
      SpawnTest("CudaDeviceChild.DISABLED_EchoesParameters",
                {params_fd->get(), versions_fd->get(), reports_fd->get()});
  auto* version = versions->mapping().at<Word>(0);
  auto* ready = reports->mapping().at<Word>(0);
  uint64_t wrong = 0;
  for (uint64_t round = 1; round <= kRounds; ++round) {
    std::fill_n(params->mapping().at<uint64_t>(0), kPayload, round * 3);
    version->store(round, std::memory_order_release);
    // A child that fails never answers.
    const int64_t deadline_ns = MonotonicNs() + 120'000'000'000;
    while (ready->load(std::memory_order_acquire) < round) {
      if (MonotonicNs() > deadline_ns || kill(child, 0) != 0) {
        kill(child, SIGKILL);
        AwaitChild(child);
        FAIL() << "no answer in round " << round;
      }
      std::this_thread::yield();
    }
    const auto* echo = reports->mapping().at<uint64_t>(kPageBytes);
    wrong += std::count_if(echo, echo + kPayload,
                           [&](uint64_t x) { return x != round * 3; });
  }
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(AwaitChild(child), 0);
}

TEST(CudaDeviceChild, DISABLED_EchoesParameters) {
  const auto params =
      shm::Mapping::Map(3, kPayload * 8, shm::Access::kReadOnly, "params");
  const auto versions =
      shm::Mapping::Map(4, kPageBytes, shm::Access::kReadOnly, "versions");
  const auto reports = shm::Mapping::Map(5, kPageBytes + kPayload * 8,
                                         shm::Access::kReadWrite, "reports");
  ASSERT_OK(params);
  ASSERT_OK(versions);
  ASSERT_OK(reports);
  ASSERT_OK_AND_ASSIGN(auto device, NewCudaDevice({}));
  const auto a = device->RegisterHost(params->data(), params->bytes(), true);
  const auto b =
      device->RegisterHost(versions->data(), versions->bytes(), true);
  const auto c = device->RegisterHost(reports->data(), reports->bytes(), false);
  ASSERT_OK(a);
  ASSERT_OK(b);
  ASSERT_OK(c);
  ASSERT_OK_AND_ASSIGN(auto stream, device->NewStream("echo"));
  ASSERT_OK_AND_ASSIGN(Buffer slot,
                       device->Allocate("slot", kPayload * 8, Memory::kDevice));
  for (uint64_t round = 1; round <= kRounds; ++round) {
    ASSERT_OK(device->WaitWord(versions->at<Word>(0), round, *stream));
    ASSERT_OK(device->Copy(slot.data(), params->data(), kPayload * 8, *stream));
    ASSERT_OK(device->Copy(reports->at<char>(kPageBytes), slot.data(),
                           kPayload * 8, *stream));
    ASSERT_OK(device->WriteWord(reports->at<Word>(0), round, *stream));
  }
  ASSERT_OK(device->Synchronize(*stream));
}

// A worker that leaves while its stream waits for a daemon that is gone.
TEST_F(CudaDeviceTest, AProcessMayLeaveWhileItsStreamWaits) {
  EXPECT_EQ(
      AwaitChild(SpawnTest("CudaDeviceChild.DISABLED_LeavesWhileWaiting", {})),
      42);
}

TEST(CudaDeviceChild, DISABLED_LeavesWhileWaiting) {
  ASSERT_OK_AND_ASSIGN(auto device, NewCudaDevice({}));
  ASSERT_OK_AND_ASSIGN(
      Buffer words, device->Allocate("words", kPageBytes, Memory::kPinnedHost));
  ASSERT_OK_AND_ASSIGN(Buffer slot,
                       device->Allocate("slot", kMiB, Memory::kDevice));
  ASSERT_OK_AND_ASSIGN(auto stream, device->NewStream("stuck"));
  ASSERT_OK(device->WaitWord(words.as<Word>(), 1, *stream));
  ASSERT_OK(device->WriteWord(words.as<Word>() + 1, 1, *stream));
  // Given up, after which frees must not wait for it either.
  stream.reset();
  slot = Buffer();
  const bool published = words.as<Word>()[1].load() != 0;
  words = Buffer();
  device.reset();
  _exit(published ? 1 : 42);
}

}  // namespace
}  // namespace slidedp::device
