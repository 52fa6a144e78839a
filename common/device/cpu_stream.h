// The stream and event of the CPU device: a thread with a bounded queue.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "common/device/device.h"

namespace slidedp::device {

// One Record. Its own object, so that a wait keeps the Record it was enqueued
// for when the event is recorded again.
class RecordPoint {
 public:
  // The recording stream, once: it got here with `status`, or dropped the
  // Record (`time_ns` empty).
  void Pass(const absl::Status& status, std::optional<int64_t> time_ns);
  // Blocks until passed or *cancel; whoever sets *cancel calls Wake().
  absl::Status Await(const std::atomic<bool>* cancel);
  void Wake();
  bool passed(absl::Status* status, std::optional<int64_t>* time_ns);

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool passed_ = false;
  absl::Status status_;
  std::optional<int64_t> time_ns_;
};

class CpuEvent : public Event {
 public:
  // Null if never recorded.
  std::shared_ptr<RecordPoint> latest() const;
  void set_latest(std::shared_ptr<RecordPoint> point);

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<RecordPoint> latest_;
};

class CpuStream : public Stream {
 public:
  // Null and an error if no thread can be started.
  static absl::StatusOr<std::unique_ptr<CpuStream>> Start(
      absl::string_view name, size_t capacity);
  ~CpuStream() override;

  absl::string_view name() const override { return name_; }

  absl::Status Enqueue(std::function<absl::Status()> work);
  absl::Status EnqueueRecord(std::shared_ptr<RecordPoint> point);
  absl::Status EnqueueWait(std::shared_ptr<RecordPoint> point);
  absl::Status EnqueueWaitWord(const std::atomic<uint64_t>* word,
                               uint64_t at_least);
  absl::Status Synchronize();

  // Of the stream whose thread calls; false in any other thread.
  static bool CurrentIsClosing();

 private:
  struct Command {
    std::function<absl::Status()> work;
    // Set for a Record instead of `work`; runs in a failed stream too.
    std::shared_ptr<RecordPoint> record;
  };

  CpuStream(absl::string_view name, size_t capacity);
  absl::Status Push(Command command);
  absl::Status AwaitPoint(RecordPoint& point);
  absl::Status AwaitWord(const std::atomic<uint64_t>& word, uint64_t at_least);
  void Run();
  void Execute(Command& command);

  const std::string name_;
  const size_t capacity_;
  std::atomic<bool> closing_{false};

  std::mutex mutex_;
  std::condition_variable not_empty_;
  std::condition_variable not_full_;
  std::condition_variable idle_;
  // Under mutex_.
  std::deque<Command> queue_;
  uint64_t enqueued_ = 0;
  uint64_t completed_ = 0;
  RecordPoint* awaited_ = nullptr;  // what the thread blocks on
  absl::Status first_error_;        // written by the stream's thread only

  std::thread thread_;
};

}  // namespace slidedp::device
