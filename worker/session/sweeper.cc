#include "worker/session/sweeper.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "common/base/status.h"

namespace slidedp::session {
namespace {

// A dying process gives its lock up soon after the pipe.
constexpr int kLockTries = 500;
constexpr int kLockPauseMs = 10;

// Everything but the pipe goes: a log pipe that stays open here would look like
// a worker that still lives.
void KeepOnly(int pipe) {
  int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  for (int fd = 0; fd <= 2; ++fd) dup2(null, fd);
  if (pipe > 3) close_range(3, static_cast<unsigned>(pipe) - 1, 0);
  close_range(static_cast<unsigned>(pipe) + 1, ~0u, 0);
}

void Sweep(const std::string& folder) {
  UniqueFd fd(
      open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!fd.valid()) return;  // renamed into place, or never made
  for (int i = 0; flock(fd.get(), LOCK_EX | LOCK_NB) != 0; ++i) {
    if (errno != EWOULDBLOCK) break;  // a file system without locks
    if (i == kLockTries) return;
    poll(nullptr, 0, kLockPauseMs);
  }
  std::error_code ignored;
  std::filesystem::remove_all(folder, ignored);
}

void Rename(int argc, char** argv) {
  constexpr char kName[] = "slidedp-sweeper";
  prctl(PR_SET_NAME, kName);
  for (int i = 0; i < argc; ++i) {
    const size_t length = std::strlen(argv[i]);
    std::memset(argv[i], 0, length);
    if (i == 0) {
      std::memcpy(argv[0], kName, std::min(length, sizeof(kName) - 1));
    }
  }
}

// The last whole (NUL-terminated) name in what came through the pipe.
std::string LastName(const std::string& told) {
  const size_t end = told.rfind('\0');
  if (end == std::string::npos || end == 0) return "";
  const size_t before = told.rfind('\0', end - 1);
  const size_t begin = before == std::string::npos ? 0 : before + 1;
  return told.substr(begin, end - begin);
}

[[noreturn]] void RunSweeper(int pipe, int argc, char** argv) {
  setsid();
  Rename(argc, argv);
  for (int signal : {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGPIPE}) {
    std::signal(signal, SIG_IGN);
  }
  KeepOnly(pipe);
  if (chdir("/") != 0) _exit(1);
  std::string told;
  char buffer[4096];
  for (;;) {
    ssize_t got = read(pipe, buffer, sizeof(buffer));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    told.append(buffer, static_cast<size_t>(got));
  }
  const std::string folder = LastName(told);
  if (!folder.empty()) Sweep(folder);
  _exit(0);
}

}  // namespace

absl::StatusOr<Sweeper> Sweeper::Start(int argc, char** argv) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) return ErrnoStatus(errno, "pipe");
  UniqueFd read_end(ends[0]), write_end(ends[1]);
  pid_t pid = fork();
  if (pid < 0) return ErrnoStatus(errno, "fork");
  if (pid == 0) RunSweeper(read_end.get(), argc, argv);
  return Sweeper(pid, std::move(write_end));
}

Sweeper::Sweeper(Sweeper&& other) noexcept
    : pid_(std::exchange(other.pid_, 0)), pipe_(std::move(other.pipe_)) {}

Sweeper::~Sweeper() {
  pipe_.Reset();
  if (pid_ <= 0) return;
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

absl::Status Sweeper::Watch(const std::string& temporary_folder) {
  return Tell(temporary_folder);
}

absl::Status Sweeper::Forget() { return Tell(""); }

absl::Status Sweeper::Tell(const std::string& folder) {
  // With its NUL, which says that the name is whole.
  const char* at = folder.c_str();
  size_t left = folder.size() + 1;
  while (left > 0) {
    ssize_t written = write(pipe_.get(), at, left);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return ErrnoStatus(errno, "tell the sweeper");
    at += written;
    left -= static_cast<size_t>(written);
  }
  return absl::OkStatus();
}

}  // namespace slidedp::session
