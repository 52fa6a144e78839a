// slidedpctl. Reads the surroundings (environment variables, terminal) and
// runs the command line.
#include <pthread.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <system_error>
#include <thread>

#include "hostd/ctl/cli.h"
#include "hostd/ctl/exit_codes.h"
#include "hostd/launch/gpu_probe.h"

namespace {

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// SIGINT is taken by one thread: a call under way is cancelled, so that it can
// say that the job goes on; otherwise the process ends at once.
void TakeInterrupts(slidedp::ctl::Interrupt& interrupt) {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  pthread_sigmask(SIG_BLOCK, &set, nullptr);  // inherited by every thread
  std::thread([&interrupt, set] {
    for (int signal = 0; sigwait(&set, &signal) == 0;) {
      if (!interrupt.armed() || interrupt.raised()) {
        _exit(slidedp::ctl::kExitInterrupted);
      }
      interrupt.Raise();
    }
  }).detach();
}

}  // namespace

int main(int argc, char** argv) {
  // A reader that leaves (`slidedpctl logs -f 1 | head`) ends us by an error on
  // the stream, not by a signal in the middle of a call.
  signal(SIGPIPE, SIG_IGN);
  // Lives as long as the detached thread: for ever.
  static slidedp::ctl::Interrupt interrupt;
  TakeInterrupts(interrupt);

  slidedp::ctl::Environment environment;
  environment.in = &std::cin;
  environment.out = &std::cout;
  environment.err = &std::cerr;
  environment.interrupt = &interrupt;
  environment.uid = geteuid();
  std::error_code error;
  environment.current_folder = std::filesystem::current_path(error).string();
  if (error) environment.current_folder = "/";
  environment.program_folder =
      std::filesystem::read_symlink("/proc/self/exe", error)
          .parent_path()
          .string();
  environment.command = "slidedpctl";
  for (int i = 1; i < argc; ++i)
    environment.command += std::string(" ") + argv[i];
  environment.temporary_folder = Variable("TMPDIR");
  environment.logical_cpus =
      static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  environment.find_gpus =
      [worker =
           environment.program_folder +
           "/slidedp-worker"]() -> absl::StatusOr<slidedp::hostd::GpuFacts> {
    if (!slidedp::hostd::NvidiaIsVisible("")) return absl::NotFoundError("");
    std::vector<std::string> variables;
    for (char** entry = environ; *entry != nullptr; ++entry) {
      variables.emplace_back(*entry);
    }
    return slidedp::hostd::ProbeGpus(worker, variables);
  };
  environment.out_is_terminal = isatty(STDOUT_FILENO) != 0;
  environment.term = Variable("TERM");
  environment.err_is_terminal =
      isatty(STDERR_FILENO) != 0 && environment.term != "dumb";
  winsize size = {};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    environment.err_columns = size.ws_col;
  }
  environment.socket = Variable("SLIDEDP_SOCKET");
  environment.xdg_runtime_dir = Variable("XDG_RUNTIME_DIR");
  environment.no_color = Variable("NO_COLOR");
  return slidedp::ctl::RunCtl({argv + 1, argv + argc}, environment);
}
