#include "hostd/ctl/bench_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/base/clock.h"
#include "common/base/fd.h"
#include "common/base/status.h"
#include "hostd/ctl/client.h"

namespace slidedp::ctl {
namespace {

constexpr auto kPollPause = std::chrono::milliseconds(20);
constexpr int64_t kStartNs = 30'000'000'000;
constexpr int64_t kTermNs = 60'000'000'000;
constexpr size_t kTailBytes = 2000;

// In the child, between fork and exec: async-signal-safe calls only.
[[noreturn]] void Execute(char* const* argv, int log, int parent, int report) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(127);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  signal(SIGPIPE, SIG_DFL);
  const int null = open("/dev/null", O_RDONLY);
  dup2(null, STDIN_FILENO);
  dup2(log, STDOUT_FILENO);
  dup2(log, STDERR_FILENO);
  execv(argv[0], argv);
  const int error = errno;
  const ssize_t ignored = write(report, &error, sizeof(error));
  (void)ignored;
  _exit(127);
}

}  // namespace

absl::StatusOr<ChildProcess> ChildProcess::Start(
    const std::vector<std::string>& argv, const std::string& log_file) {
  SDP_ASSIGN_OR_RETURN(const UniqueFd log,
                       OpenFile(log_file, O_WRONLY | O_CREAT | O_APPEND, 0600));
  std::vector<char*> pointers;
  for (const std::string& argument : argv) {
    pointers.push_back(const_cast<char*>(argument.c_str()));
  }
  pointers.push_back(nullptr);
  // Closed by a successful exec; otherwise it brings exec's errno.
  int report[2];
  if (pipe2(report, O_CLOEXEC) != 0) return ErrnoStatus(errno, "pipe");
  UniqueFd read_end(report[0]), write_end(report[1]);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) return ErrnoStatus(errno, "fork");
  if (pid == 0) {
    Execute(pointers.data(), log.get(), parent, write_end.get());
  }
  write_end.Reset();
  ChildProcess child(pid);
  int error = 0;
  if (read(read_end.get(), &error, sizeof(error)) == sizeof(error)) {
    return ErrnoStatus(error, argv[0]);
  }
  return child;
}

std::optional<int> ChildProcess::Poll() {
  if (pid_ == 0) return status_;
  const pid_t got = waitpid(pid_, &status_, WNOHANG);
  if (got == 0 || (got < 0 && errno == EINTR)) return std::nullopt;
  pid_ = 0;
  return status_;
}

absl::StatusOr<int> ChildProcess::Wait(Interrupt& interrupt) {
  for (;;) {
    if (std::optional<int> status = Poll()) return *status;
    if (interrupt.raised()) {
      End();
      return absl::CancelledError("interrupted");
    }
    std::this_thread::sleep_for(kPollPause);
  }
}

void ChildProcess::End() {
  if (pid_ == 0 || Poll()) return;
  kill(pid_, SIGTERM);
  const int64_t deadline_ns = MonotonicNs() + kTermNs;
  while (!Poll()) {
    if (MonotonicNs() > deadline_ns) kill(pid_, SIGKILL);
    std::this_thread::sleep_for(kPollPause);
  }
}

std::string PrivateSocket(const std::string& folder) {
  return absl::StrCat(folder, "/run/slidedpd.sock");
}

std::string LogTail(const std::string& file) {
  absl::StatusOr<std::string> text = ReadFile(file, uint64_t{64} << 20);
  if (!text.ok()) return "";
  if (text->size() <= kTailBytes) return *text;
  return text->substr(text->size() - kTailBytes);
}

absl::StatusOr<std::unique_ptr<ChildProcess>> StartPrivateDaemon(
    const std::string& program, const std::string& folder,
    Interrupt& interrupt) {
  const std::string log = absl::StrCat(folder, "/slidedpd.log");
  absl::StatusOr<ChildProcess> started = ChildProcess::Start(
      {program, "--runtime-dir", absl::StrCat(folder, "/run"), "--state-dir",
       absl::StrCat(folder, "/state")},
      log);
  if (!started.ok()) {
    return Annotate(started.status(),
                    "no daemon answers, and none can be "
                    "started");
  }
  auto daemon = std::make_unique<ChildProcess>(*std::move(started));
  const int64_t deadline_ns = MonotonicNs() + kStartNs;
  while (!ProbeSocket(PrivateSocket(folder)).ok()) {
    if (interrupt.raised()) return absl::CancelledError("interrupted");
    if (daemon->Poll() || MonotonicNs() > deadline_ns) {
      return absl::UnavailableError(
          absl::StrCat(program, " did not start:\n", LogTail(log)));
    }
    std::this_thread::sleep_for(kPollPause);
  }
  return daemon;
}

}  // namespace slidedp::ctl
