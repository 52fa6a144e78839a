#include "hostd/launch/spawn.h"

#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"

namespace slidedp::hostd {
namespace {

// What failed between fork and exec, in one write to the parent.
struct ChildError {
  int step;
  int error_number;
};
enum Step { kGroups, kGid, kUid, kDeath, kOutput, kFolder, kExec };
constexpr const char* kStepNames[] = {"set its groups",
                                      "set its group",
                                      "set its user",
                                      "tie its life to us",
                                      "redirect its output",
                                      "change to /",
                                      "execute"};

// Prepared before the fork: the child of a process with threads may only make
// system calls.
struct ChildPlan {
  std::vector<char*> argv;
  std::vector<char*> environment;
  std::vector<gid_t> groups;
  bool become = false;
  uid_t uid = 0;
  gid_t gid = 0;
  pid_t parent = 0;
  int null_fd = -1;
  int output_fd = -1;
  int error_fd = -1;
};

[[noreturn]] void Fail(const ChildPlan& plan, Step step) {
  ChildError error{step, errno};
  ssize_t ignored = write(plan.error_fd, &error, sizeof(error));
  (void)ignored;
  _exit(127);
}

void ResetSignals() {
  struct sigaction defaults = {};
  defaults.sa_handler = SIG_DFL;
  for (int signal = 1; signal < NSIG; ++signal) {
    sigaction(signal, &defaults, nullptr);
  }
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
}

// A worker is the better victim: what it holds can be computed again.
void PreferAsOomVictim() {
  int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
  if (fd < 0) return;
  ssize_t ignored = write(fd, "500", 3);
  (void)ignored;
  close(fd);
}

// Close-on-exec for everything above 2. Kernels before 5.11 lack the flag;
// there all our own descriptors have it anyway.
void CloseOthersAtExec() {
#ifdef SYS_close_range
  constexpr unsigned kCloseRangeCloexec = 1u << 2;
  syscall(SYS_close_range, 3u, ~0u, kCloseRangeCloexec);
#endif
}

[[noreturn]] void RunChild(const ChildPlan& plan) {
  setpgid(0, 0);
  ResetSignals();
  PreferAsOomVictim();
  if (plan.become) {
    // Raw: glibc's wrappers would look for the parent's threads.
    if (syscall(SYS_setgroups, plan.groups.size(), plan.groups.data()) != 0) {
      Fail(plan, kGroups);
    }
    if (syscall(SYS_setresgid, plan.gid, plan.gid, plan.gid) != 0) {
      Fail(plan, kGid);
    }
    if (syscall(SYS_setresuid, plan.uid, plan.uid, plan.uid) != 0) {
      Fail(plan, kUid);
    }
  }
  // After the change of user, which clears it.
  if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0) Fail(plan, kDeath);
  if (getppid() != plan.parent) _exit(127);
  struct rlimit no_core = {0, 0};
  setrlimit(RLIMIT_CORE, &no_core);  // it would hold the user's weights
  umask(022);
  if (dup2(plan.null_fd, 0) < 0 || dup2(plan.output_fd, 1) < 0 ||
      dup2(plan.output_fd, 2) < 0) {
    Fail(plan, kOutput);
  }
  if (chdir("/") != 0) Fail(plan, kFolder);
  CloseOthersAtExec();
  execve(plan.argv[0], plan.argv.data(), plan.environment.data());
  Fail(plan, kExec);
}

std::vector<char*> Pointers(const std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (const std::string& s : strings) {
    pointers.push_back(const_cast<char*>(s.c_str()));
  }
  pointers.push_back(nullptr);
  return pointers;
}

// Above 2, so that dup2 onto 0 to 2 never meets one of ours.
absl::StatusOr<UniqueFd> AboveStandard(UniqueFd fd) {
  if (fd.get() > 2) return fd;
  UniqueFd moved(fcntl(fd.get(), F_DUPFD_CLOEXEC, 3));
  if (!moved.valid()) return ErrnoStatus(errno, "fcntl(F_DUPFD_CLOEXEC)");
  return moved;
}

struct Pipe {
  UniqueFd read, write;
};
absl::StatusOr<Pipe> MakePipe() {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) return ErrnoStatus(errno, "pipe2");
  Pipe pipe{UniqueFd(fds[0]), UniqueFd(fds[1])};
  SDP_ASSIGN_OR_RETURN(pipe.read, AboveStandard(std::move(pipe.read)));
  SDP_ASSIGN_OR_RETURN(pipe.write, AboveStandard(std::move(pipe.write)));
  return pipe;
}

}  // namespace

absl::StatusOr<Spawned> Spawn(const LaunchRequest& request) {
  const std::string& binary = request.argv[0];
  SDP_ASSIGN_OR_RETURN(Pipe output, MakePipe());
  SDP_ASSIGN_OR_RETURN(Pipe error, MakePipe());
  SDP_ASSIGN_OR_RETURN(UniqueFd null_fd, OpenFile("/dev/null", O_RDONLY));
  SDP_ASSIGN_OR_RETURN(null_fd, AboveStandard(std::move(null_fd)));

  ChildPlan plan;
  plan.argv = Pointers(request.argv);
  plan.environment = Pointers(request.environment);
  plan.groups.assign(request.groups.begin(), request.groups.end());
  plan.become = geteuid() == 0 && request.uid != 0;
  plan.uid = request.uid;
  plan.gid = request.gid;
  plan.parent = getpid();
  plan.null_fd = null_fd.get();
  plan.output_fd = output.write.get();
  plan.error_fd = error.write.get();

  // Our handlers must not run in the child before they are reset.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  pid_t pid = fork();
  if (pid == 0) RunChild(plan);
  int fork_error = errno;
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (pid < 0) return ErrnoStatus(fork_error, "fork");

  setpgid(pid, pid);  // whoever comes first
  output.write.Reset();
  error.write.Reset();
  ChildError failure;
  ssize_t got;
  do {
    got = read(error.read.get(), &failure, sizeof(failure));
  } while (got < 0 && errno == EINTR);
  if (got != 0) {
    kill(pid, SIGKILL);
    while (waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
    }
    if (got != sizeof(failure)) {
      return absl::InternalError(absl::StrCat("start ", binary, ": failed"));
    }
    return ErrnoStatus(
        failure.error_number,
        absl::StrCat("start ", binary, ": ", kStepNames[failure.step]));
  }

  Spawned spawned;
  spawned.pid = pid;
  spawned.pidfd = UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (!spawned.pidfd.valid() ||
      fcntl(output.read.get(), F_SETFL, O_NONBLOCK) != 0) {
    absl::Status status = ErrnoStatus(errno, "watch a worker");
    kill(-pid, SIGKILL);
    while (waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
    }
    return status;
  }
  spawned.output = std::move(output.read);
  return spawned;
}

}  // namespace slidedp::hostd
