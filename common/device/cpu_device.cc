#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <unordered_map>
#include <utility>

#include "common/base/check.h"
#include "common/base/memory.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/device/cpu_stream.h"
#include "common/device/device.h"

namespace slidedp::device {
namespace {

// Bytes of one device. Outlives it if a buffer does.
struct Account {
  std::mutex mutex;
  size_t bytes = 0;
};

// Whose account a live allocation is on: Buffer's `free` gets no context.
struct LiveAllocations {
  std::mutex mutex;
  std::unordered_map<void*, std::shared_ptr<Account>> accounts;
};

LiveAllocations& Live() {
  // Never destroyed: a buffer may be freed by a static's destructor.
  static LiveAllocations* live = new LiveAllocations;
  return *live;
}

void FreePages(void* data, size_t bytes) {
  std::shared_ptr<Account> account;
  {
    std::lock_guard<std::mutex> lock(Live().mutex);
    auto node = Live().accounts.extract(data);
    SDP_CHECK(!node.empty(), "a buffer was freed twice");
    account = std::move(node.mapped());
  }
  munmap(data, bytes);
  std::lock_guard<std::mutex> lock(account->mutex);
  account->bytes -= bytes;
}

absl::Status OtherKind(absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("the ", what, " is not of a CPU device"));
}

absl::StatusOr<CpuStream*> AsCpu(Stream& stream) {
  auto* cpu = dynamic_cast<CpuStream*>(&stream);
  if (cpu == nullptr) {
    return OtherKind(absl::StrCat("stream ", stream.name()));
  }
  return cpu;
}

absl::StatusOr<CpuEvent*> AsCpu(Event& event) {
  auto* cpu = dynamic_cast<CpuEvent*>(&event);
  if (cpu == nullptr) return OtherKind("event");
  return cpu;
}

absl::Status CheckMemory(absl::string_view what, const void* data,
                         size_t bytes) {
  if (data != nullptr || bytes == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, " of ", bytes, " bytes at a null pointer"));
}

absl::Status CheckWord(const std::atomic<uint64_t>* word) {
  if (word != nullptr &&
      reinterpret_cast<uintptr_t>(word) % alignof(std::atomic<uint64_t>) == 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      "a word must be a non-null pointer to 8 aligned bytes");
}

int UsableThreads() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
  return std::max(1u, std::thread::hardware_concurrency());
}

absl::string_view VectorUnit() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return "AVX-512";
  if (__builtin_cpu_supports("avx2")) return "AVX2";
  return "SSE";
#elif defined(__aarch64__)
  return "NEON";
#else
  return "scalar";
#endif
}

class NoRegistration : public HostRegistration {};

class CpuDevice : public Device {
 public:
  explicit CpuDevice(const CpuOptions& options)
      : options_(options), account_(std::make_shared<Account>()) {
    SDP_CHECK(options.stream_capacity >= 1,
              "a stream must hold at least one command");
  }

  Kind kind() const override { return Kind::kCpu; }

  std::string description() const override {
    const int threads = UsableThreads();
    return absl::StrCat("cpu (", VectorUnit(), ", ", threads, " thread",
                        threads == 1 ? "" : "s", ")");
  }

  absl::StatusOr<Buffer> Allocate(absl::string_view name, size_t bytes,
                                  Memory where) override {
    if (bytes == 0) return Buffer();
    // The kernel promises more than it has; an absurd size fails here and not
    // by the death of some process at its first touch.
    SDP_ASSIGN_OR_RETURN(const MemoryRoom room, AvailableMemory());
    if (bytes > room.bytes) {
      return OutOfMemory(name, bytes,
                         absl::StrCat("only ", FormatBytes(room.bytes),
                                      " are left by ", room.limit));
    }
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
      return OutOfMemory(name, bytes, ErrnoStatus(errno, "mmap").message());
    }
    {
      std::lock_guard<std::mutex> lock(Live().mutex);
      Live().accounts[data] = account_;
    }
    std::lock_guard<std::mutex> lock(account_->mutex);
    account_->bytes += bytes;
    return Buffer(data, bytes, &FreePages);
  }

  size_t allocated_bytes() const override {
    std::lock_guard<std::mutex> lock(account_->mutex);
    return account_->bytes;
  }

  absl::StatusOr<std::unique_ptr<HostRegistration>> RegisterHost(
      void* data, size_t bytes, bool read_only) override {
    if (data == nullptr || bytes == 0) {
      return absl::InvalidArgumentError("registering an empty memory range");
    }
    return std::make_unique<NoRegistration>();
  }

  absl::StatusOr<std::unique_ptr<Stream>> NewStream(
      absl::string_view name) override {
    return CpuStream::Start(name, options_.stream_capacity);
  }

  absl::StatusOr<std::unique_ptr<Event>> NewEvent() override {
    return std::make_unique<CpuEvent>();
  }

  absl::Status Copy(void* dst, const void* src, size_t bytes,
                    Stream& stream) override {
    SDP_ASSIGN_OR_RETURN(CpuStream * cpu, AsCpu(stream));
    SDP_RETURN_IF_ERROR(CheckMemory("copy", dst, bytes));
    SDP_RETURN_IF_ERROR(CheckMemory("copy", src, bytes));
    return cpu->Enqueue([dst, src, bytes] {
      if (bytes != 0) std::memmove(dst, src, bytes);
      return absl::OkStatus();
    });
  }

  absl::Status FillZero(void* dst, size_t bytes, Stream& stream) override {
    SDP_ASSIGN_OR_RETURN(CpuStream * cpu, AsCpu(stream));
    SDP_RETURN_IF_ERROR(CheckMemory("fill", dst, bytes));
    return cpu->Enqueue([dst, bytes] {
      if (bytes != 0) std::memset(dst, 0, bytes);
      return absl::OkStatus();
    });
  }

  absl::Status Record(Event& event, Stream& stream) override {
    SDP_ASSIGN_OR_RETURN(CpuStream * cpu, AsCpu(stream));
    SDP_ASSIGN_OR_RETURN(CpuEvent * cpu_event, AsCpu(event));
    auto point = std::make_shared<RecordPoint>();
    SDP_RETURN_IF_ERROR(cpu->EnqueueRecord(point));
    cpu_event->set_latest(std::move(point));
    return absl::OkStatus();
  }

  absl::Status Wait(Event& event, Stream& stream) override {
    SDP_ASSIGN_OR_RETURN(CpuStream * cpu, AsCpu(stream));
    SDP_ASSIGN_OR_RETURN(CpuEvent * cpu_event, AsCpu(event));
    std::shared_ptr<RecordPoint> point = cpu_event->latest();
    if (point == nullptr) return absl::OkStatus();
    return cpu->EnqueueWait(std::move(point));
  }

  absl::Status WaitWord(const std::atomic<uint64_t>* word, uint64_t at_least,
                        Stream& stream) override {
    SDP_ASSIGN_OR_RETURN(CpuStream * cpu, AsCpu(stream));
    SDP_RETURN_IF_ERROR(CheckWord(word));
    return cpu->EnqueueWaitWord(word, at_least);
  }

  absl::Status WriteWord(std::atomic<uint64_t>* word, uint64_t value,
                         Stream& stream) override {
    SDP_ASSIGN_OR_RETURN(CpuStream * cpu, AsCpu(stream));
    SDP_RETURN_IF_ERROR(CheckWord(word));
    return cpu->Enqueue([word, value] {
      word->store(value, std::memory_order_release);
      return absl::OkStatus();
    });
  }

  absl::Status Synchronize(Stream& stream) override {
    SDP_ASSIGN_OR_RETURN(CpuStream * cpu, AsCpu(stream));
    return cpu->Synchronize();
  }

  absl::Status Synchronize(Event& event) override {
    SDP_ASSIGN_OR_RETURN(CpuEvent * cpu_event, AsCpu(event));
    std::shared_ptr<RecordPoint> point = cpu_event->latest();
    return point == nullptr ? absl::OkStatus() : point->Await(nullptr);
  }

  absl::StatusOr<int64_t> TimestampNs(Event& event) override {
    SDP_ASSIGN_OR_RETURN(CpuEvent * cpu_event, AsCpu(event));
    std::shared_ptr<RecordPoint> point = cpu_event->latest();
    if (point == nullptr) {
      return absl::FailedPreconditionError("the event was never recorded");
    }
    absl::Status status;
    std::optional<int64_t> time_ns;
    if (!point->passed(&status, &time_ns)) {
      return absl::FailedPreconditionError(
          "the event's record is not passed yet; synchronize it first");
    }
    if (!time_ns.has_value()) return status;
    return *time_ns;
  }

 private:
  absl::Status OutOfMemory(absl::string_view name, size_t bytes,
                           absl::string_view why) const {
    return absl::ResourceExhaustedError(absl::StrCat(
        name, ": ", FormatBytes(bytes), " (", bytes,
        " bytes) can't be allocated on the CPU device, which holds ",
        FormatBytes(allocated_bytes()), ": ", why));
  }

  const CpuOptions options_;
  const std::shared_ptr<Account> account_;
};

}  // namespace

std::unique_ptr<Device> NewCpuDevice(const CpuOptions& options) {
  return std::make_unique<CpuDevice>(options);
}

absl::Status EnqueueOnCpu(Stream& stream,
                          std::function<absl::Status()> command) {
  SDP_ASSIGN_OR_RETURN(CpuStream * cpu, AsCpu(stream));
  if (command == nullptr) {
    return absl::InvalidArgumentError("an empty command was enqueued");
  }
  return cpu->Enqueue(std::move(command));
}

bool CpuStreamIsClosing() { return CpuStream::CurrentIsClosing(); }

}  // namespace slidedp::device
