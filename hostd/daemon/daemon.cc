#include "hostd/daemon/daemon.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "hostd/daemon/core.h"
#include "hostd/server/socket_server.h"
#include "hostd/server/sockets.h"

#ifndef SLIDEDP_VERSION
#error "SLIDEDP_VERSION comes from the build"
#endif

namespace slidedp::hostd {
namespace {

// A few per worker and connection; the soft limit of 1024 is for programs that
// use select().
void RaiseDescriptorLimit() {
  struct rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

int LogicalCpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) {
    return static_cast<int>(std::thread::hardware_concurrency());
  }
  return CPU_COUNT(&set);
}

class RunningDaemon final : public Daemon {
 public:
  RunningDaemon(Config config, Supervision supervision)
      : config_(std::move(config)), supervision_(std::move(supervision)) {}
  ~RunningDaemon() override { Finish(); }

  absl::Status Start();
  void BeginStop(std::function<void()> done) override;
  void Finish() override;

 private:
  void Tell(const std::string& message) {
    absl::Status status = Notify(supervision_.notify_socket, message);
    if (!status.ok()) spdlog::warn("{}", std::string(status.message()));
  }

  const Config config_;
  const Supervision supervision_;
  std::optional<LockFile> lock_;
  std::unique_ptr<Journal> journal_;
  EventLoop loop_;
  std::unique_ptr<Core> core_;
  std::unique_ptr<SocketServer> server_;
  std::thread loop_thread_;
};

absl::Status RunningDaemon::Start() {
  RaiseDescriptorLimit();
  SDP_ASSIGN_OR_RETURN(
      InheritedSockets inherited,
      TakeInherited(supervision_.listen_pid, supervision_.listen_fds));
  // Root's sockets are for every user, a user's own for that user.
  const bool is_root = geteuid() == 0;
  SDP_RETURN_IF_ERROR(PrepareFolder(config_.runtime_dir, !is_root));
  SDP_ASSIGN_OR_RETURN(LockFile lock, LockFile::Take(config_.lock_file()));
  lock_.emplace(std::move(lock));
  SDP_RETURN_IF_ERROR(PrepareFolder(config_.state_dir, true));
  if (access(config_.worker_binary.c_str(), X_OK) != 0) {
    spdlog::warn("worker_binary {}: {}; only jobs with launch: manual can run",
                 config_.worker_binary, strerror(errno));
  }

  SDP_ASSIGN_OR_RETURN(journal_, Journal::Open(config_.journal_file()));
  CoreParts parts;
  parts.loop = &loop_;
  parts.journal = journal_.get();
  parts.config = config_;
  parts.facts.logical_cpus = LogicalCpus();
  parts.facts.update_threads = static_cast<int>(config_.update_threads);
  parts.own_uid = geteuid();
  parts.version = SLIDEDP_VERSION;
  parts.memory = ReadHostMemory;
  parts.gpus = [this] {
    return ProbeGpus(config_.worker_binary, config_.worker_environment);
  };
  core_ = std::make_unique<Core>(std::move(parts));
  SDP_RETURN_IF_ERROR(core_->Recover());

  if (!inherited.control.fd.valid()) {
    SDP_ASSIGN_OR_RETURN(inherited.control,
                         Listen(config_.control_socket(), SOCK_STREAM));
  }
  if (!inherited.attach.fd.valid()) {
    SDP_ASSIGN_OR_RETURN(inherited.attach,
                         Listen(config_.attach_socket(), SOCK_SEQPACKET));
  }
  core_->StartTicking();
  loop_thread_ = std::thread([this] { loop_.Run(); });
  ServerConfig server;
  server.access = {geteuid(), config_.user_group, config_.admin_group};
  server.max_connections_per_user = config_.max_connections_per_user;
  SDP_ASSIGN_OR_RETURN(
      server_, SocketServer::Start(server, std::move(inherited.control),
                                   std::move(inherited.attach), loop_, *core_));
  spdlog::info("slidedpd {} listens at {}", SLIDEDP_VERSION,
               config_.control_socket());
  Tell("READY=1");
  return absl::OkStatus();
}

void RunningDaemon::BeginStop(std::function<void()> done) {
  Tell("STOPPING=1");
  loop_.Post([this, done = std::move(done)] { core_->Stop(done); });
}

void RunningDaemon::Finish() {
  if (server_ != nullptr) server_->Stop();
  loop_.Stop();
  if (loop_thread_.joinable()) loop_thread_.join();
  // Services before the core that they call, the core before its journal.
  server_.reset();
  core_.reset();
  journal_.reset();
  lock_.reset();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Daemon>> Daemon::Start(
    const Config& config, const Supervision& supervision) {
  auto daemon = std::make_unique<RunningDaemon>(config, supervision);
  SDP_RETURN_IF_ERROR(daemon->Start());
  return daemon;
}

}  // namespace slidedp::hostd
