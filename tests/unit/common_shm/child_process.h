// Runs a function in a forked child. What is checked there comes back as the
// number of the first failed check.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <functional>

namespace slidedp::shm {

// 0: all is well; otherwise what `body` returned (1 to 254), or 255 if the
// child died.
inline int ExitCodeInChild(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return child > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : 255;
}

}  // namespace slidedp::shm
