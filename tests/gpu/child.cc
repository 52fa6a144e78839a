#include "tests/gpu/child.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "common/base/check.h"

namespace slidedp::testing {

int SpawnTest(const std::string& test, const std::vector<int>& fds) {
  const std::string filter = "--gtest_filter=" + test;
  const int pid = fork();
  SDP_CHECK(pid >= 0, "fork failed");
  if (pid > 0) return pid;
  // First out of the way of 3, 4, ..., then onto them.
  std::vector<int> high;
  for (int fd : fds) high.push_back(fcntl(fd, F_DUPFD, 100));
  for (size_t i = 0; i < high.size(); ++i) {
    if (dup2(high[i], 3 + static_cast<int>(i)) < 0) _exit(99);
    close(high[i]);
  }
  execl("/proc/self/exe", "child", filter.c_str(),
        "--gtest_also_run_disabled_tests", static_cast<char*>(nullptr));
  _exit(98);
}

int AwaitChild(int pid) {
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace slidedp::testing
