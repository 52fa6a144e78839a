// slidedpd: flags and file -> Config -> Daemon; then signals.
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>

#include "CLI/CLI.hpp"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/base/clock.h"
#include "common/base/fd.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "hostd/daemon/config.h"
#include "hostd/daemon/daemon.h"

extern char** environ;

namespace slidedp::hostd {
namespace {

constexpr int kExitOk = 0;
constexpr int kExitFailure = 1;
constexpr int kExitConfig = 78;  // EX_CONFIG: a service manager must not retry
constexpr uint64_t kMaxConfigFileBytes = 1 << 20;

std::string Environment(const char* name) {
  const char* value = getenv(name);
  return value == nullptr ? "" : value;
}

// What a worker gets of our environment: its language, BLAS threads, what its
// GPU libraries read, and in sanitizer builds their options.
std::vector<std::string> WorkerEnvironment() {
  std::vector<std::string> passed;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    absl::string_view pair = *entry;
    absl::string_view name = pair.substr(0, pair.find('='));
    if (absl::StartsWith(name, "OPENBLAS_") ||
        absl::StartsWith(name, "CUDA_") || absl::StartsWith(name, "NCCL_") ||
        name == "LD_LIBRARY_PATH" || name == "LANG" ||
        name == "SLIDEDP_RANKS_PER_GPU" ||
        absl::EndsWith(name, "SAN_OPTIONS")) {
      passed.emplace_back(pair);
    }
  }
  return passed;
}

absl::StatusOr<Config> MakeConfig(
    const std::string& file, const std::map<std::string, std::string>& flags) {
  Surroundings surroundings;
  surroundings.uid = geteuid();
  surroundings.xdg_runtime_dir = Environment("XDG_RUNTIME_DIR");
  surroundings.xdg_state_home = Environment("XDG_STATE_HOME");
  surroundings.home = Environment("HOME");
  std::error_code error;
  surroundings.executable =
      std::filesystem::read_symlink("/proc/self/exe", error).string();
  Config config = DefaultConfig(surroundings);
  if (!file.empty()) {
    SDP_ASSIGN_OR_RETURN(std::string yaml, ReadFile(file, kMaxConfigFileBytes));
    SDP_ASSIGN_OR_RETURN(auto settings, ParseConfigFile(yaml, file));
    for (const auto& [key, value] : settings) {
      SDP_RETURN_IF_ERROR(Apply(config, file, key, value));
    }
  }
  for (const auto& [key, value] : flags) {
    SDP_RETURN_IF_ERROR(Apply(config, "command line", key, value));
  }
  SDP_RETURN_IF_ERROR(Validate(config));
  config.worker_environment = WorkerEnvironment();
  return config;
}

// Returns when the daemon has to be finished.
void WaitForStop(Daemon& daemon, int signals, uint64_t stop_timeout_s) {
  // Written by BeginStop's callback; the descriptor outlives the daemon's
  // threads because Finish joins them before it is closed.
  static int done_fd = eventfd(0, EFD_CLOEXEC);
  bool stopping = false;
  int64_t give_up_ns = 0;
  while (true) {
    pollfd polled[] = {{signals, POLLIN, 0}, {done_fd, POLLIN, 0}};
    int timeout_ms = -1;
    if (stopping) {
      timeout_ms = static_cast<int>(
          std::max<int64_t>(0, (give_up_ns - MonotonicNs()) / 1'000'000));
    }
    int ready = poll(polled, 2, timeout_ms);
    if (ready == 0) {
      spdlog::error("jobs are not gone after {} s; leaving them",
                    stop_timeout_s);
      return;
    }
    if (polled[1].revents != 0) return;
    if (polled[0].revents == 0) continue;
    signalfd_siginfo info;
    if (read(signals, &info, sizeof(info)) != sizeof(info)) continue;
    if (info.ssi_signo == SIGHUP) {
      spdlog::info("SIGHUP: settings are read at start only");
      continue;
    }
    if (stopping) {
      spdlog::warn("second signal: leaving at once");
      return;
    }
    stopping = true;
    give_up_ns =
        MonotonicNs() + static_cast<int64_t>(stop_timeout_s) * 1'000'000'000;
    spdlog::info("stopping");
    daemon.BeginStop([] {
      uint64_t one = 1;
      ssize_t ignored = write(done_fd, &one, sizeof(one));
      (void)ignored;
    });
  }
}

int Main(int argc, char** argv) {
  CLI::App app{
      "slidedpd: keeps the training state of SlideDP jobs, queues them and "
      "starts their workers"};
  app.set_version_flag("--version", "slidedpd " SLIDEDP_VERSION);
  std::string file;
  app.add_option("--config", file, "YAML file with the same settings");
  std::map<std::string, std::string> values;
  for (const Setting& setting : Settings()) {
    app.add_option("--" + absl::StrReplaceAll(setting.key, {{"_", "-"}}),
                   values[setting.key], setting.help);
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? kExitOk : kExitConfig;
  }
  std::map<std::string, std::string> flags;
  for (const auto& [key, value] : values) {
    if (app.count("--" + absl::StrReplaceAll(key, {{"_", "-"}})) > 0) {
      flags[key] = value;
    }
  }
  absl::StatusOr<Config> config = MakeConfig(file, flags);
  absl::Status status = config.status();
  if (status.ok()) {
    status = InitLogging("slidedpd", config->log_level,
                         !Environment("JOURNAL_STREAM").empty());
  }
  if (!status.ok()) {
    std::fprintf(stderr, "slidedpd: %s\n",
                 std::string(status.message()).c_str());
    return kExitConfig;
  }

  umask(077);
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);  // a file beyond its limit is an error of its write
  // Before any thread: all of them inherit the mask.
  sigset_t handled;
  sigemptyset(&handled);
  sigaddset(&handled, SIGTERM);
  sigaddset(&handled, SIGINT);
  sigaddset(&handled, SIGHUP);
  pthread_sigmask(SIG_BLOCK, &handled, nullptr);
  UniqueFd signals(signalfd(-1, &handled, SFD_CLOEXEC));

  Supervision supervision{Environment("NOTIFY_SOCKET"),
                          Environment("LISTEN_PID"), Environment("LISTEN_FDS")};
  absl::StatusOr<std::unique_ptr<Daemon>> daemon =
      Daemon::Start(*config, supervision);
  if (!daemon.ok()) {
    spdlog::error("{}", std::string(daemon.status().message()));
    return kExitFailure;
  }
  WaitForStop(**daemon, signals.get(), config->stop_timeout_s);
  (*daemon)->Finish();
  spdlog::info("stopped");
  return kExitOk;
}

}  // namespace
}  // namespace slidedp::hostd

int main(int argc, char** argv) { return slidedp::hostd::Main(argc, argv); }
