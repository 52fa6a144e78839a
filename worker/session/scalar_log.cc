#include "worker/session/scalar_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "worker/session/event_file.h"

namespace slidedp::session {
namespace {

constexpr size_t kMostQueued = 1 << 16;

double WallTime() { return static_cast<double>(UnixMicros()) * 1e-6; }

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "host";
}

}  // namespace

absl::StatusOr<std::unique_ptr<ScalarLog>> ScalarLog::Open(
    const std::string& folder, uint64_t job) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) {
    return InvalidInput("", "tensorboard", folder, error.message(),
                        "name a folder that you may write to");
  }
  // As TensorBoard's own writers name theirs.
  const std::string file = absl::StrCat(
      folder, "/events.out.tfevents.", static_cast<int64_t>(WallTime()), ".",
      HostName(), ".", getpid(), ".job-", job);
  SDP_ASSIGN_OR_RETURN(
      UniqueFd fd,
      OpenFile(file, O_WRONLY | O_CREAT | O_EXCL | O_APPEND, 0644));
  return std::unique_ptr<ScalarLog>(new ScalarLog(file, std::move(fd)));
}

ScalarLog::ScalarLog(std::string file, UniqueFd fd)
    : file_(std::move(file)), fd_(std::move(fd)) {
  queue_.push_back(Framed(VersionEvent(WallTime())));
  writer_ = std::thread([this] { Write(); });
}

ScalarLog::~ScalarLog() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  writer_.join();
}

void ScalarLog::Add(const v1::Record& record) {
  std::string event =
      Framed(ScalarEvent(WallTime(), StepOf(record), ScalarsOf(record)));
  std::lock_guard<std::mutex> lock(mutex_);
  // A file system that hangs must not fill the memory.
  if (closing_ || queue_.size() >= kMostQueued) return;
  queue_.push_back(std::move(event));
  changed_.notify_all();
}

void ScalarLog::Write() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    std::string events;
    for (const std::string& event : std::exchange(queue_, {})) events += event;
    lock.unlock();
    const ssize_t written = write(fd_.get(), events.data(), events.size());
    const int reason = written < 0 ? errno : ENOSPC;
    lock.lock();
    if (written == static_cast<ssize_t>(events.size())) continue;
    spdlog::error("{}: {}; no more scalars are written", file_,
                  std::string(ErrnoStatus(reason, "write").message()));
    closing_ = true;
    queue_.clear();
    return;
  }
}

}  // namespace slidedp::session
