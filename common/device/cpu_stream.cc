#include "common/device/cpu_stream.h"

#include <pthread.h>

#include <system_error>
#include <utility>

#include "common/base/backoff.h"
#include "common/base/clock.h"
#include "common/base/status.h"

namespace slidedp::device {
namespace {

thread_local const std::atomic<bool>* current_closing = nullptr;

absl::Status Closing(absl::string_view name) {
  return absl::CancelledError(
      absl::StrCat("stream ", name, " is being destroyed"));
}

}  // namespace

void RecordPoint::Pass(const absl::Status& status,
                       std::optional<int64_t> time_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  passed_ = true;
  status_ = status;
  time_ns_ = time_ns;
  changed_.notify_all();
}

absl::Status RecordPoint::Await(const std::atomic<bool>* cancel) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(
      lock, [&] { return passed_ || (cancel != nullptr && cancel->load()); });
  return passed_ ? status_ : absl::CancelledError("the wait was cancelled");
}

void RecordPoint::Wake() {
  std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
}

bool RecordPoint::passed(absl::Status* status,
                         std::optional<int64_t>* time_ns) {
  std::lock_guard<std::mutex> lock(mutex_);
  *status = status_;
  *time_ns = time_ns_;
  return passed_;
}

std::shared_ptr<RecordPoint> CpuEvent::latest() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return latest_;
}

void CpuEvent::set_latest(std::shared_ptr<RecordPoint> point) {
  std::lock_guard<std::mutex> lock(mutex_);
  latest_ = std::move(point);
}

absl::StatusOr<std::unique_ptr<CpuStream>> CpuStream::Start(
    absl::string_view name, size_t capacity) {
  std::unique_ptr<CpuStream> stream(new CpuStream(name, capacity));
  try {
    stream->thread_ = std::thread([raw = stream.get()] { raw->Run(); });
  } catch (const std::system_error& error) {
    return ErrnoStatus(error.code().value(),
                       absl::StrCat("starting the thread of stream ", name));
  }
  return stream;
}

CpuStream::CpuStream(absl::string_view name, size_t capacity)
    : name_(name), capacity_(capacity) {}

CpuStream::~CpuStream() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_.store(true);
    // The point can't go away: the command that runs holds it.
    if (awaited_ != nullptr) awaited_->Wake();
    not_empty_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  // Whoever waits for a Record that will not happen must hear of it.
  for (Command& command : queue_) {
    if (command.record != nullptr) {
      command.record->Pass(first_error_.ok() ? Closing(name_) : first_error_,
                           std::nullopt);
    }
  }
}

absl::Status CpuStream::Enqueue(std::function<absl::Status()> work) {
  return Push({std::move(work), nullptr});
}

absl::Status CpuStream::EnqueueRecord(std::shared_ptr<RecordPoint> point) {
  return Push({nullptr, std::move(point)});
}

absl::Status CpuStream::EnqueueWait(std::shared_ptr<RecordPoint> point) {
  return Enqueue(
      [this, point = std::move(point)] { return AwaitPoint(*point); });
}

absl::Status CpuStream::EnqueueWaitWord(const std::atomic<uint64_t>* word,
                                        uint64_t at_least) {
  return Enqueue([this, word, at_least] { return AwaitWord(*word, at_least); });
}

absl::Status CpuStream::Push(Command command) {
  std::unique_lock<std::mutex> lock(mutex_);
  not_full_.wait(lock, [&] { return queue_.size() < capacity_; });
  queue_.push_back(std::move(command));
  ++enqueued_;
  not_empty_.notify_one();
  return absl::OkStatus();
}

absl::Status CpuStream::Synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t target = enqueued_;
  idle_.wait(lock, [&] { return completed_ >= target; });
  return first_error_;
}

bool CpuStream::CurrentIsClosing() {
  return current_closing != nullptr && current_closing->load();
}

absl::Status CpuStream::AwaitPoint(RecordPoint& point) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    awaited_ = &point;
  }
  absl::Status status = point.Await(&closing_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    awaited_ = nullptr;
  }
  return Annotate(status, "waiting for an event");
}

absl::Status CpuStream::AwaitWord(const std::atomic<uint64_t>& word,
                                  uint64_t at_least) {
  Backoff backoff;
  while (word.load(std::memory_order_acquire) < at_least) {
    if (closing_.load(std::memory_order_relaxed)) return Closing(name_);
    backoff.Pause();
  }
  return absl::OkStatus();
}

void CpuStream::Run() {
  pthread_setname_np(pthread_self(), name_.substr(0, 15).c_str());
  UseFineTimerSlack();
  current_closing = &closing_;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    not_empty_.wait(lock, [&] { return closing_.load() || !queue_.empty(); });
    if (closing_.load()) return;
    {
      Command command = std::move(queue_.front());
      queue_.pop_front();
      not_full_.notify_one();
      lock.unlock();
      Execute(command);
      // `command` goes before the lock is taken: what its closure owns may
      // call back into this stream's device.
    }
    lock.lock();
    ++completed_;
    idle_.notify_all();
  }
}

void CpuStream::Execute(Command& command) {
  if (command.record != nullptr) {
    command.record->Pass(first_error_, MonotonicNs());
    return;
  }
  if (!first_error_.ok()) return;
  absl::Status status = command.work();
  if (status.ok()) return;
  status = Annotate(status, absl::StrCat("stream ", name_));
  std::lock_guard<std::mutex> lock(mutex_);
  first_error_ = std::move(status);
}

}  // namespace slidedp::device
