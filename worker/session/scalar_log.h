// A job's records as an event file in a folder of the user, for TensorBoard.
// Rank 0 writes it because it runs as the user, and the daemon opens no path of
// a user. A thread of its own writes, so that a slow file system holds up
// nothing; after an error, which the log tells, nothing more is written.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "common/base/fd.h"
#include "proto/job.pb.h"

namespace slidedp::session {

class ScalarLog {
 public:
  // Makes the folder if need be, and a new file in it.
  static absl::StatusOr<std::unique_ptr<ScalarLog>> Open(
      const std::string& folder, uint64_t job);
  // Writes what is queued.
  ~ScalarLog();
  // From any thread; does not wait for the file.
  void Add(const v1::Record& record);

 private:
  ScalarLog(std::string file, UniqueFd fd);
  void Write();

  const std::string file_;
  UniqueFd fd_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::string> queue_;  // guarded by mutex_
  bool closing_ = false;           // guarded by mutex_
  std::thread writer_;
};

}  // namespace slidedp::session
