// Memory and ordered work on one accelerator, or on the CPU acting as one.
//
// Work is enqueued on a Stream and runs in order within it; streams are
// concurrent. The first failure of an enqueued operation stays with its stream:
// what follows is skipped, Record excepted, and Synchronize returns the error.
// A stream that waits for an event recorded by a failed or destroyed stream
// fails too, so nothing that depends on a failure is ever published. Pointers
// are borrowed until the stream has passed. All methods may be called from any
// thread, but one Stream takes work from one thread at a time.
//
// A stream holds a bounded number of pending commands (about a thousand);
// enqueueing beyond that blocks. Callers therefore enqueue in dependency order
// and a bounded distance ahead.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace slidedp::device {

enum class Memory {
  kDevice,      // where kernels run
  kPinnedHost,  // readable by the CPU, asynchronous copies at full rate
};

enum class Kind { kCpu, kCuda };

// One allocation. Move-only; freed on destruction, which must come after the
// streams that use it are drained.
class Buffer {
 public:
  Buffer() = default;
  // `free` is called with `data` once.
  Buffer(void* data, size_t bytes, void (*free)(void* data, size_t bytes))
      : data_(data), bytes_(bytes), free_(free) {}
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(free_, other.free_);
    return *this;
  }
  ~Buffer() {
    if (data_ != nullptr && free_ != nullptr) free_(data_, bytes_);
  }

  void* data() const { return data_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
  void (*free_)(void*, size_t) = nullptr;
};

// An in-order queue. Destroying it drops what has not started (a pending word
// wait included) and waits for the command that runs.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual absl::string_view name() const = 0;
};

// A point in a stream. Re-recording moves it.
class Event {
 public:
  virtual ~Event() = default;
};

// Keeps host memory registered for copies, and for ops to read it, or to write
// it unless it is read-only, in place.
class HostRegistration {
 public:
  virtual ~HostRegistration() = default;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual Kind kind() const = 0;
  // "cpu (AVX2, 2 threads)", "NVIDIA H200 (sm_90)".
  virtual std::string description() const = 0;

  // `name` appears in the out-of-memory message, with the bytes asked for and
  // those already allocated. Contents are zero. Addresses are multiples of 256;
  // 0 bytes is an empty Buffer.
  virtual absl::StatusOr<Buffer> Allocate(absl::string_view name, size_t bytes,
                                          Memory where) = 0;
  // Bytes handed out by Allocate and not freed.
  virtual size_t allocated_bytes() const = 0;

  virtual absl::StatusOr<std::unique_ptr<HostRegistration>> RegisterHost(
      void* data, size_t bytes, bool read_only) = 0;

  virtual absl::StatusOr<std::unique_ptr<Stream>> NewStream(
      absl::string_view name) = 0;
  virtual absl::StatusOr<std::unique_ptr<Event>> NewEvent() = 0;

  // Ordered work. Copy directions are inferred from the pointers; at least one
  // side is device memory (CUDA makes the host wait for a copy between two host
  // addresses, and so for whatever the stream waits for).
  virtual absl::Status Copy(void* dst, const void* src, size_t bytes,
                            Stream& stream) = 0;
  virtual absl::Status FillZero(void* dst, size_t bytes, Stream& stream) = 0;
  virtual absl::Status Record(Event& event, Stream& stream) = 0;
  // The stream waits for the event's latest Record at the time of this call; an
  // event never recorded holds nothing up.
  virtual absl::Status Wait(Event& event, Stream& stream) = 0;
  // The stream waits until *word >= at_least (acquire). The word may be in
  // memory that this process maps read-only.
  virtual absl::Status WaitWord(const std::atomic<uint64_t>* word,
                                uint64_t at_least, Stream& stream) = 0;
  // *word = value (release), after everything before it in the stream.
  virtual absl::Status WriteWord(std::atomic<uint64_t>* word, uint64_t value,
                                 Stream& stream) = 0;

  // The calling thread waits for what is enqueued so far, or for the event's
  // latest Record. Returns the first error of the stream.
  virtual absl::Status Synchronize(Stream& stream) = 0;
  virtual absl::Status Synchronize(Event& event) = 0;
  // MonotonicNs at which the event's latest Record was passed. The event must
  // have been synchronized. For lane timings and traces.
  virtual absl::StatusOr<int64_t> TimestampNs(Event& event) = 0;
};

struct CpuOptions {
  // Commands a stream holds before enqueueing blocks.
  size_t stream_capacity = 1024;
};
std::unique_ptr<Device> NewCpuDevice(const CpuOptions& options);

// What the CPU ops use: runs `command` in stream order. `stream` must come from
// a CPU device.
absl::Status EnqueueOnCpu(Stream& stream,
                          std::function<absl::Status()> command);
// Called from within such a command: true once the stream is being destroyed. A
// command that may wait long polls it and returns CancelledError.
bool CpuStreamIsClosing();

}  // namespace slidedp::device
