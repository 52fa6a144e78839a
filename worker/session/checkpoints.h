// Rank 0's part in checkpoints, on a thread of its own while the main thread
// trains: makes the files and passes them, and puts the folder in place when
// the daemon has filled them. A failure is told to the daemon and ends nothing
// else.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "common/checkpoint/folder.h"
#include "common/model/source.h"
#include "proto/control.pb.h"
#include "worker/session/attachment.h"
#include "worker/session/proposal.h"
#include "worker/session/sweeper.h"

namespace slidedp::session {

class Checkpoints {
 public:
  // All is borrowed. `source`: null if the job has no files. `send` is called
  // on the own thread.
  Checkpoints(uint64_t job, const Proposal& proposal,
              const model::TensorSource* source, Attachment& attachment,
              Sweeper& sweeper,
              std::function<void(const v1::WorkerMessage&)> send);
  ~Checkpoints();  // what is not in place is removed

  // Whether the message is one for this.
  static bool Takes(const v1::DaemonMessage& message);
  // From any thread.
  void Post(const v1::DaemonMessage& message);

 private:
  void Run();
  void Handle(const v1::DaemonMessage& message);
  void Open(uint64_t step);
  absl::Status MakeAndPass(uint64_t step);
  void Commit(const std::string& manifest);
  void Fail(const std::string& why);

  const uint64_t job_;
  const Proposal& proposal_;
  const model::TensorSource* const source_;
  Attachment& attachment_;
  Sweeper& sweeper_;
  const std::function<void(const v1::WorkerMessage&)> send_;

  std::unique_ptr<checkpoint::NewCheckpoint> open_;  // the own thread's

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<v1::DaemonMessage> messages_;  // guarded by mutex_
  bool stopping_ = false;                   // guarded by mutex_
  std::thread thread_;                      // last
};

}  // namespace slidedp::session
