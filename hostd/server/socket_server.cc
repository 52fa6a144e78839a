#include "hostd/server/socket_server.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/server_posix.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <list>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/clock.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "common/shm/fd_passing.h"
#include "hostd/server/connections.h"
#include "hostd/server/services.h"

#ifndef GPR_SUPPORT_CHANNELS_FROM_FD
#error "this gRPC can't serve accepted descriptors"
#endif

namespace slidedp::hostd {
namespace {

constexpr int64_t kSecondNs = 1'000'000'000;
constexpr int64_t kSweepNs = 60 * kSecondNs;
constexpr int64_t kIdleServerNs = 600 * kSecondNs;
// For the first packet of an attach connection.
constexpr int64_t kAttachNs = 10 * kSecondNs;
// Out of descriptors: what may end meanwhile.
constexpr int kExhaustedPauseMs = 100;
constexpr int kMaxMessageBytes = 4 << 20;
constexpr auto kShutdownGrace = std::chrono::seconds(2);

// The server of one (uid, is_admin). The services carry the identity; no
// request can claim another.
struct IdentityServer {
  IdentityServer(const Identity& identity, EventLoop& loop, Core& core)
      : control(identity, loop, core), worker(identity, loop, core) {}

  ControlService control;
  WorkerService worker;
  Connections connections;
  int64_t idle_since_ns = 0;
  std::unique_ptr<grpc::Server> server;  // ends before its services
};

class Acceptor final : public SocketServer {
 public:
  Acceptor(const ServerConfig& config, ListeningSocket control,
           ListeningSocket attach, UniqueFd wake, EventLoop& loop, Core& core)
      : config_(config),
        control_(std::move(control)),
        attach_(std::move(attach)),
        wake_(std::move(wake)),
        loop_(loop),
        core_(core) {
    thread_ = std::thread([this] { Run(); });
  }
  ~Acceptor() override { Stop(); }
  void Stop() override;

 private:
  struct PendingAttach {
    std::shared_ptr<AttachConnection> connection;
    int64_t deadline_ns;
  };

  void Run();
  // The next connection and who it is; invalid when there is none.
  UniqueFd Accept(const ListeningSocket& listener, Identity& identity);
  void AcceptControl();
  void AcceptAttach();
  void ReadAttach(PendingAttach& pending);
  void Sweep(int64_t now_ns);
  IdentityServer* ServerOf(const Identity& identity);

  const ServerConfig config_;
  ListeningSocket control_;
  ListeningSocket attach_;
  UniqueFd wake_;  // readable: stop
  EventLoop& loop_;
  Core& core_;
  // The thread's; after it, Stop's.
  std::map<std::pair<uint32_t, bool>, std::unique_ptr<IdentityServer>> servers_;
  std::list<PendingAttach> pending_;
  bool exhausted_ = false;
  std::thread thread_;
};

void Acceptor::Run() {
  int64_t next_sweep_ns = MonotonicNs() + kSweepNs;
  while (true) {
    std::vector<pollfd> polled = {{wake_.get(), POLLIN, 0}};
    const short accepting = exhausted_ ? 0 : POLLIN;
    polled.push_back({control_.fd.get(), accepting, 0});
    polled.push_back({attach_.fd.get(), accepting, 0});
    int64_t next_ns = next_sweep_ns;
    for (const PendingAttach& pending : pending_) {
      polled.push_back({pending.connection->socket.get(), POLLIN, 0});
      next_ns = std::min(next_ns, pending.deadline_ns);
    }
    const int64_t left_ms =
        std::max<int64_t>(0, (next_ns - MonotonicNs()) / 1'000'000 + 1);
    const int timeout_ms =
        exhausted_ ? kExhaustedPauseMs : static_cast<int>(left_ms);
    if (poll(polled.data(), polled.size(), timeout_ms) < 0 && errno != EINTR) {
      spdlog::critical("server: poll: {}", strerror(errno));
      return;
    }
    if (polled[0].revents != 0) return;
    exhausted_ = false;
    const int64_t now_ns = MonotonicNs();
    size_t i = 3;
    for (auto it = pending_.begin(); it != pending_.end(); ++i) {
      if (polled[i].revents != 0) {
        ReadAttach(*it);
        it = pending_.erase(it);
      } else if (now_ns >= it->deadline_ns) {
        it = pending_.erase(it);
      } else {
        ++it;
      }
    }
    if (polled[1].revents != 0) AcceptControl();
    if (polled[2].revents != 0) AcceptAttach();
    if (now_ns >= next_sweep_ns) {
      Sweep(now_ns);
      next_sweep_ns = now_ns + kSweepNs;
    }
  }
}

UniqueFd Acceptor::Accept(const ListeningSocket& listener, Identity& identity) {
  UniqueFd fd(accept4(listener.fd.get(), nullptr, nullptr,
                      SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!fd.valid()) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS ||
        errno == ENOMEM) {
      spdlog::error("{}: accept: {}", listener.path, strerror(errno));
      exhausted_ = true;
    }
    return fd;
  }
  absl::StatusOr<Peer> peer = PeerOf(fd.get());
  if (peer.ok()) {
    absl::StatusOr<Identity> who = Identify(*peer, config_.access);
    if (who.ok()) {
      identity = *std::move(who);
      return fd;
    }
    spdlog::warn("{}: refused: {}", listener.path,
                 std::string(who.status().message()));
  } else {
    spdlog::warn("{}: {}", listener.path, std::string(peer.status().message()));
  }
  return UniqueFd();
}

IdentityServer* Acceptor::ServerOf(const Identity& identity) {
  std::unique_ptr<IdentityServer>& entry =
      servers_[{identity.uid, identity.is_admin}];
  if (entry != nullptr) return entry.get();
  entry = std::make_unique<IdentityServer>(identity, loop_, core_);
  grpc::ServerBuilder builder;
  builder.RegisterService(&entry->control);
  builder.RegisterService(&entry->worker);
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.SetMaxSendMessageSize(kMaxMessageBytes);
  // A frozen client is noticed and its streams end.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 20'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, 256);
  entry->server = builder.BuildAndStart();
  if (entry->server == nullptr) {
    spdlog::error("no gRPC server for {}", identity.user);
    servers_.erase({identity.uid, identity.is_admin});
    return nullptr;
  }
  return entry.get();
}

void Acceptor::AcceptControl() {
  Identity identity;
  UniqueFd fd = Accept(control_, identity);
  if (!fd.valid()) return;
  IdentityServer* server = ServerOf(identity);
  if (server == nullptr) return;
  if (!server->connections.Add(fd.get(), config_.max_connections_per_user)) {
    spdlog::warn("{}: refused: {} has {} connections open", control_.path,
                 identity.user, config_.max_connections_per_user);
    return;
  }
  server->idle_since_ns = 0;
  grpc::AddInsecureChannelFromFd(server->server.get(), fd.Release());
}

void Acceptor::AcceptAttach() {
  Identity identity;
  UniqueFd fd = Accept(attach_, identity);
  if (!fd.valid()) return;
  const auto waiting = std::count_if(
      pending_.begin(), pending_.end(), [&](const PendingAttach& pending) {
        return pending.connection->uid == identity.uid;
      });
  if (static_cast<size_t>(waiting) >= config_.max_connections_per_user) {
    spdlog::warn("{}: refused: {} has {} silent connections", attach_.path,
                 identity.user, waiting);
    return;
  }
  auto connection = std::make_shared<AttachConnection>();
  connection->socket = std::move(fd);
  connection->uid = identity.uid;
  pending_.push_back({std::move(connection), MonotonicNs() + kAttachNs});
}

void Acceptor::ReadAttach(PendingAttach& pending) {
  absl::StatusOr<shm::Message> message =
      shm::ReceiveMessage(pending.connection->socket.get(), 0);
  v1::AttachRequest request;
  if (!message.ok() || !message->fds.empty() ||
      !request.ParseFromString(message->payload)) {
    return;  // closes it
  }
  loop_.Post([this, connection = std::move(pending.connection), request] {
    core_.OnAttach(connection, request);
  });
}

void Acceptor::Sweep(int64_t now_ns) {
  for (auto it = servers_.begin(); it != servers_.end();) {
    IdentityServer& server = *it->second;
    if (server.connections.CountAlive() > 0) {
      server.idle_since_ns = 0;
    } else if (server.idle_since_ns == 0) {
      server.idle_since_ns = now_ns;
    } else if (now_ns - server.idle_since_ns >= kIdleServerNs) {
      server.server->Shutdown(std::chrono::system_clock::now());
      server.server->Wait();
      it = servers_.erase(it);
      continue;
    }
    ++it;
  }
}

void Acceptor::Stop() {
  if (!thread_.joinable()) return;
  uint64_t one = 1;
  ssize_t ignored = write(wake_.get(), &one, sizeof(one));
  (void)ignored;
  thread_.join();
  for (ListeningSocket* listener : {&control_, &attach_}) {
    if (!listener->inherited) unlink(listener->path.c_str());
    listener->fd.Reset();
  }
  pending_.clear();
  const auto deadline = std::chrono::system_clock::now() + kShutdownGrace;
  for (auto& [key, server] : servers_) server->server->Shutdown(deadline);
  for (auto& [key, server] : servers_) server->server->Wait();
  servers_.clear();
}

}  // namespace

absl::StatusOr<std::unique_ptr<SocketServer>> SocketServer::Start(
    const ServerConfig& config, ListeningSocket control, ListeningSocket attach,
    EventLoop& loop, Core& core) {
  UniqueFd wake(eventfd(0, EFD_CLOEXEC));
  if (!wake.valid()) return ErrnoStatus(errno, "eventfd");
  return std::make_unique<Acceptor>(config, std::move(control),
                                    std::move(attach), std::move(wake), loop,
                                    core);
}

}  // namespace slidedp::hostd
