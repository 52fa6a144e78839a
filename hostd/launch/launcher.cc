#include "hostd/launch/launcher.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/base/fd.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "hostd/launch/log_file.h"
#include "hostd/launch/spawn.h"

namespace slidedp::hostd {
namespace {

class LauncherThread : public Launcher {
 public:
  LauncherThread(Events events, UniqueFd wake)
      : events_(std::move(events)), wake_(std::move(wake)) {
    thread_ = std::thread([this] { Run(); });
  }
  ~LauncherThread() override { Stop(); }

  void Launch(LaunchRequest request) override {
    Command command;
    command.launch = std::move(request);
    Push(std::move(command));
  }

  void Signal(uint64_t job, int signal) override {
    Command command;
    command.job = job;
    command.signal = signal;
    Push(std::move(command));
  }

  void Stop() override {
    if (!thread_.joinable()) return;
    Command command;
    command.stop = true;
    Push(std::move(command));
    thread_.join();
  }

 private:
  struct Command {
    std::optional<LaunchRequest> launch;
    uint64_t job = 0;
    int signal = 0;
    bool stop = false;
  };
  // Touched by the launcher's thread only.
  struct Child {
    Spawned process;
    std::optional<LogFile> log;
  };

  void Push(Command command) {
    {
      std::lock_guard lock(mutex_);
      commands_.push_back(std::move(command));
    }
    uint64_t one = 1;
    ssize_t ignored = write(wake_.get(), &one, sizeof(one));
    (void)ignored;
  }

  void Run();
  bool TakeCommands();  // false: stop
  void LaunchNow(const LaunchRequest& request);
  // Everything readable; closes the pipe at its end.
  void ReadOutput(WorkerId id, Child& child);
  // Whether the child is reaped, and so gone from the map.
  bool Reap(WorkerId id);
  void KillAll();

  Events events_;
  UniqueFd wake_;
  std::mutex mutex_;
  std::deque<Command> commands_;  // guarded by mutex_
  std::map<WorkerId, Child> children_;
  std::thread thread_;
};

void LauncherThread::Run() {
  bool running = true;
  while (running) {
    std::vector<pollfd> polled = {{wake_.get(), POLLIN, 0}};
    // Two entries a child; a closed pipe is -1, which poll passes over.
    std::vector<WorkerId> ids;
    for (const auto& [id, child] : children_) {
      ids.push_back(id);
      polled.push_back({child.process.pidfd.get(), POLLIN, 0});
      polled.push_back({child.process.output.get(), POLLIN, 0});
    }
    if (poll(polled.data(), polled.size(), -1) < 0) {
      if (errno == EINTR) continue;
      spdlog::critical("launcher: poll: {}", strerror(errno));
      break;
    }
    for (size_t i = 0; i < ids.size(); ++i) {
      if (polled[2 + 2 * i].revents != 0) {
        ReadOutput(ids[i], children_.at(ids[i]));
      }
      if (polled[1 + 2 * i].revents != 0) Reap(ids[i]);
    }
    if (polled[0].revents != 0) {
      uint64_t count;
      ssize_t ignored = read(wake_.get(), &count, sizeof(count));
      (void)ignored;
      running = TakeCommands();
    }
  }
  KillAll();
}

bool LauncherThread::TakeCommands() {
  while (true) {
    Command command;
    {
      std::lock_guard lock(mutex_);
      if (commands_.empty()) return true;
      command = std::move(commands_.front());
      commands_.pop_front();
    }
    if (command.stop) return false;
    if (command.launch) {
      LaunchNow(*command.launch);
      continue;
    }
    for (const auto& [id, child] : children_) {
      if (id.job == command.job) kill(-child.process.pid, command.signal);
    }
  }
}

void LauncherThread::LaunchNow(const LaunchRequest& request) {
  auto launch = [&]() -> absl::StatusOr<Launched> {
    SDP_ASSIGN_OR_RETURN(
        LogFile log, LogFile::Open(request.log_file, request.log_max_bytes));
    SDP_ASSIGN_OR_RETURN(Spawned process, Spawn(request));
    Launched launched;
    launched.pid = process.pid;
    // A child that is a zombie already still has its entry.
    SDP_ASSIGN_OR_RETURN(launched.start_ticks, StartTicks(process.pid));
    children_[request.id] = Child{std::move(process), std::move(log)};
    return launched;
  };
  events_.launched(request.id, launch());
}

void LauncherThread::ReadOutput(WorkerId id, Child& child) {
  static constexpr size_t kPieceBytes = 64 * kKiB;
  std::string piece(kPieceBytes, '\0');
  // One piece a round: a worker that never stops talking must not keep us from
  // the others.
  ssize_t got = read(child.process.output.get(), piece.data(), piece.size());
  if (got > 0) {
    child.log->Append(absl::string_view(piece.data(), got));
    events_.output(id);
  } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
    child.process.output.Reset();
  }
}

bool LauncherThread::Reap(WorkerId id) {
  Child& child = children_.at(id);
  siginfo_t info = {};
  // Leaves the zombie: its pid, and so its process group's number, stay ours
  // while the rest of the group is killed.
  if (waitid(P_PID, child.process.pid, &info, WEXITED | WNOHANG | WNOWAIT) !=
          0 ||
      info.si_pid == 0) {
    return false;
  }
  kill(-child.process.pid, SIGKILL);
  // What it wrote before its death is in the pipe. Someone who left the group
  // may hold the pipe open: read what is there, not to its end.
  for (int pieces = 0; pieces < 1024 && child.process.output.valid();
       ++pieces) {
    pollfd readable = {child.process.output.get(), POLLIN, 0};
    if (poll(&readable, 1, 0) <= 0) break;
    ReadOutput(id, child);
  }
  WorkerExit exit;
  if (info.si_code == CLD_EXITED) {
    exit.code = info.si_status;
  } else {
    exit.signal = info.si_status;
  }
  waitid(P_PID, child.process.pid, &info, WEXITED);
  children_.erase(id);
  events_.exited(id, exit);
  return true;
}

void LauncherThread::KillAll() {
  for (const auto& [id, child] : children_) {
    kill(-child.process.pid, SIGKILL);
  }
  for (const auto& [id, child] : children_) {
    while (waitpid(child.process.pid, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  children_.clear();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Launcher>> Launcher::Start(Events events) {
  UniqueFd wake(eventfd(0, EFD_CLOEXEC));
  if (!wake.valid()) return ErrnoStatus(errno, "eventfd");
  return std::make_unique<LauncherThread>(std::move(events), std::move(wake));
}

std::string Describe(const WorkerExit& exit) {
  if (exit.signal != 0) {
    const char* name = sigabbrev_np(exit.signal);
    return absl::StrCat(
        "was killed by signal ", exit.signal,
        name == nullptr ? "" : absl::StrCat(" (SIG", name, ")"));
  }
  return absl::StrCat("exited with code ", exit.code);
}

absl::StatusOr<uint64_t> StartTicks(int32_t pid) {
  std::string path = absl::StrCat("/proc/", pid, "/stat");
  SDP_ASSIGN_OR_RETURN(UniqueFd fd, OpenFile(path, O_RDONLY));
  char text[1024];
  ssize_t got = read(fd.get(), text, sizeof(text));
  if (got <= 0) return ErrnoStatus(errno, path);
  // The command, field 2, may hold anything; the last ')' ends it.
  absl::string_view stat(text, got);
  size_t end = stat.rfind(')');
  if (end == absl::string_view::npos) {
    return absl::InternalError(absl::StrCat(path, " can't be read"));
  }
  std::vector<absl::string_view> fields =
      absl::StrSplit(stat.substr(end + 1), ' ', absl::SkipEmpty());
  uint64_t ticks;
  if (fields.size() < 20 || !absl::SimpleAtoi(fields[19], &ticks)) {
    return absl::InternalError(absl::StrCat(path, " can't be read"));
  }
  return ticks;
}

absl::StatusOr<std::string> BootId() {
  SDP_ASSIGN_OR_RETURN(UniqueFd fd,
                       OpenFile("/proc/sys/kernel/random/boot_id", O_RDONLY));
  char text[64];
  ssize_t got = read(fd.get(), text, sizeof(text));
  if (got <= 0) return ErrnoStatus(errno, "boot_id");
  return std::string(
      absl::StripTrailingAsciiWhitespace(absl::string_view(text, got)));
}

bool KillLeftover(int32_t pid, uint64_t start_ticks) {
  // The pidfd first: what it refers to can't change any more.
  UniqueFd pidfd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (!pidfd.valid()) return false;
  // Dead already, whoever has to reap it.
  pollfd dead = {pidfd.get(), POLLIN, 0};
  if (poll(&dead, 1, 0) != 0) return false;
  absl::StatusOr<uint64_t> ticks = StartTicks(pid);
  if (!ticks.ok() || *ticks != start_ticks) return false;
  return syscall(SYS_pidfd_send_signal, pidfd.get(), SIGKILL, nullptr, 0) == 0;
}

}  // namespace slidedp::hostd
