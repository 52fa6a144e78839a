// slidedp-worker: one rank of one job. Started by slidedpd, or by hand for a
// job with `launch: manual`.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdlib>
#include <iostream>
#include <map>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/socket_path.h"
#include "common/device/accelerator.h"
#include "worker/session/config.h"
#include "worker/session/probe.h"
#include "worker/session/session.h"
#include "worker/session/sweeper.h"

namespace slidedp::session {
namespace {

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

int Main(int argc, char** argv) {
  // Before any thread and any call into the driver.
  device::PrepareAcceleratorProcess();
  Config config;
  bool probe = false;
  CLI::App app("Computes one rank of a job of slidedpd.", "slidedp-worker");
  app.footer(
      "Exit codes: 0 told to leave, 1 this rank failed, 2 usage, 3 the daemon\n"
      "aborted the job, 4 the daemon is gone.");
  CLI::Option* job = app.add_option("--job", config.job, "Job id")
                         ->type_name("ID")
                         ->check(CLI::PositiveNumber);
  CLI::Option* rank =
      app.add_option("--rank", config.rank, "Rank, from 0")->type_name("R");
  const std::map<std::string, DeviceChoice> devices = {
      {"auto", DeviceChoice::kAuto},
      {"cpu", DeviceChoice::kCpu},
      {"cuda", DeviceChoice::kCuda}};
  std::string device = "auto";
  app.add_option("--device", device,
                 "The job's device: cpu, cuda, or auto: a GPU if this build "
                 "has CUDA and one is visible (several: the one numbered as "
                 "the rank)")
      ->type_name("DEVICE")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  app.add_flag("--probe", probe,
               "Print what GPUs a worker would see, as JSON, and leave");
  app.add_option("--socket", config.socket,
                 "The daemon's control socket. Default: SLIDEDP_SOCKET, else "
                 "where slidedpctl looks for it")
      ->type_name("PATH");
  app.add_option("--log-level", config.log_level,
                 "trace, debug, info, warning, error, critical or off")
      ->type_name("LEVEL");
  try {
    app.parse(argc, argv);
    if (!probe && (job->empty() || rank->empty())) {
      throw CLI::RequiredError(job->empty() ? "--job" : "--rank");
    }
  } catch (const CLI::ParseError& e) {
    return app.exit(e) == 0 ? 0 : kUsage;
  }
  config.device = devices.at(device);
  if (probe) {
    std::cout << ProbeLine() << std::endl;
    return kLeft;
  }
  absl::Status logging = InitLogging(absl::StrCat("rank ", config.rank),
                                     config.log_level, /*journal=*/false);
  if (!logging.ok()) {
    std::cerr << "slidedp-worker: " << std::string(logging.message()) << "\n";
    return kUsage;
  }
  if (config.socket.empty()) {
    absl::StatusOr<std::string> socket =
        DaemonSocketPath({geteuid(), Variable("SLIDEDP_SOCKET"),
                          Variable("XDG_RUNTIME_DIR"), ""});
    if (!socket.ok()) {
      spdlog::error("{}", std::string(socket.status().message()));
      return kUsage;
    }
    config.socket = *std::move(socket);
  }
  // A daemon that leaves shows as an error of the call, not as a signal.
  std::signal(SIGPIPE, SIG_IGN);
  // A file beyond its limit is an error of its write.
  std::signal(SIGXFSZ, SIG_IGN);
  // Before gRPC or the device has a thread.
  std::optional<Sweeper> sweeper;
  if (config.rank == 0) {
    absl::StatusOr<Sweeper> started = Sweeper::Start(argc, argv);
    if (!started.ok()) {
      spdlog::error("{}", std::string(started.status().message()));
      return kFailed;
    }
    sweeper.emplace(*std::move(started));
  }
  Session session(config, sweeper.has_value() ? &*sweeper : nullptr);
  session.Run();
  return kLeft;
}

}  // namespace
}  // namespace slidedp::session

int main(int argc, char** argv) { return slidedp::session::Main(argc, argv); }
