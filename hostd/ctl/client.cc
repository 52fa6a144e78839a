#include "hostd/ctl/client.h"

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/clock.h"
#include "common/base/fd.h"
#include "common/base/status.h"
#include "hostd/ctl/exit_codes.h"

namespace slidedp::ctl {
namespace {

constexpr auto kCallTimeout = std::chrono::seconds(30);
constexpr int kSubmitAttempts = 3;

// Names this process for the daemon's log; never used for identity.
std::unique_ptr<v1::Control::Stub> NewStub(const std::string& socket) {
  grpc::ChannelArguments arguments;
  arguments.SetUserAgentPrefix("slidedpctl");
  // Another user of this process must not share the connection's state.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  return v1::Control::NewStub(
      grpc::CreateCustomChannel(absl::StrCat("unix:", socket),
                                grpc::InsecureChannelCredentials(), arguments));
}

}  // namespace

ExitCode ExitCodeOfCall(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return kExitOk;
    case absl::StatusCode::kNotFound:
      return kExitNotFound;
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated:
      return kExitPermission;
    case absl::StatusCode::kUnavailable:
      return kExitUnreachable;
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kAlreadyExists:
      return kExitWrongState;
    case absl::StatusCode::kDeadlineExceeded:
      return kExitTimeout;
    default:
      return kExitFailure;
  }
}

absl::Status ProbeSocket(const std::string& socket) {
  constexpr absl::string_view kRemedy =
      "start slidedpd, or name its socket with --socket or SLIDEDP_SOCKET";
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (socket.size() >= sizeof(address.sun_path)) {
    return absl::UnavailableError(absl::StrCat(
        "socket ", socket, ": path longer than ", sizeof(address.sun_path) - 1,
        " bytes; use a shorter one"));
  }
  std::memcpy(address.sun_path, socket.c_str(), socket.size() + 1);
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return ErrnoStatus(errno, "socket");
  if (connect(fd.get(), reinterpret_cast<sockaddr*>(&address),
              sizeof(address)) == 0 ||
      errno == EAGAIN) {
    return absl::OkStatus();
  }
  switch (errno) {
    case ENOENT:
    case ENOTDIR:
      return absl::UnavailableError(
          absl::StrCat("no daemon: ", socket, " does not exist; ", kRemedy));
    case ECONNREFUSED:
      return absl::UnavailableError(absl::StrCat(
          "no daemon: nothing listens on ", socket, "; ", kRemedy));
    case EACCES:
    case EPERM:
      return absl::PermissionDeniedError(absl::StrCat(
          socket, " is closed to this user; ask the administrator, or run a ",
          "slidedpd of your own"));
    case EPROTOTYPE:
      return absl::UnavailableError(absl::StrCat(
          socket, " is not the daemon's control socket; ", kRemedy));
    default:
      return absl::UnavailableError(
          absl::StrCat(socket, ": ", std::strerror(errno), "; ", kRemedy));
  }
}

std::string NewClientId() {
  std::array<uint8_t, 16> bytes;
  size_t have = 0;
  while (have < bytes.size()) {
    ssize_t got = getrandom(bytes.data() + have, bytes.size() - have, 0);
    if (got > 0) have += static_cast<size_t>(got);
  }
  bytes[6] = (bytes[6] & 0x0f) | 0x40;  // version 4
  bytes[8] = (bytes[8] & 0x3f) | 0x80;  // RFC 4122 variant
  std::string text;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    absl::StrAppendFormat(&text, "%02x", bytes[i]);
  }
  return text;
}

ControlClient::ControlClient(const std::string& socket)
    : socket_(socket), stub_(NewStub(socket)) {}

absl::Status ControlClient::Convert(const grpc::Status& status) const {
  if (status.ok()) return absl::OkStatus();
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE) {
    SDP_RETURN_IF_ERROR(ProbeSocket(socket_));
    return absl::UnavailableError(
        absl::StrCat("the daemon at ", socket_,
                     " ended the connection: ", status.error_message()));
  }
  if (status.error_code() == grpc::StatusCode::UNIMPLEMENTED) {
    return absl::UnimplementedError(
        absl::StrCat("the daemon at ", socket_,
                     " does not know this call; slidedpctl and slidedpd must ",
                     "be of one release"));
  }
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()),
                      status.error_message());
}

template <typename Request, typename Reply, typename Call>
absl::StatusOr<Reply> ControlClient::Unary(const Request& request, Call call) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kCallTimeout);
  Reply reply;
  grpc::Status status = (stub_.get()->*call)(&context, request, &reply);
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
    // A daemon that accepts but does not answer is not reached.
    return absl::UnavailableError(
        absl::StrCat("the daemon at ", socket_, " did not answer within ",
                     std::chrono::seconds(kCallTimeout).count(), " s"));
  }
  SDP_RETURN_IF_ERROR(Convert(status));
  return reply;
}

absl::StatusOr<v1::SubmitReply> ControlClient::Submit(
    const v1::SubmitRequest& request) {
  for (int attempt = 1;; ++attempt) {
    auto reply = Unary<v1::SubmitRequest, v1::SubmitReply>(
        request, &v1::Control::Stub::Submit);
    if (!absl::IsUnavailable(reply.status()) || attempt == kSubmitAttempts ||
        !ProbeSocket(socket_).ok()) {
      return reply;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(200) * attempt);
  }
}

absl::StatusOr<v1::ListReply> ControlClient::List(bool ended) {
  v1::ListRequest request;
  request.set_ended(ended);
  return Unary<v1::ListRequest, v1::ListReply>(request,
                                               &v1::Control::Stub::List);
}

absl::StatusOr<v1::GetReply> ControlClient::Get(uint64_t id) {
  v1::GetRequest request;
  request.set_id(id);
  return Unary<v1::GetRequest, v1::GetReply>(request, &v1::Control::Stub::Get);
}

absl::StatusOr<v1::CancelReply> ControlClient::Cancel(uint64_t id) {
  v1::CancelRequest request;
  request.set_id(id);
  return Unary<v1::CancelRequest, v1::CancelReply>(request,
                                                   &v1::Control::Stub::Cancel);
}

absl::StatusOr<v1::CheckpointReply> ControlClient::Checkpoint(uint64_t id) {
  v1::CheckpointRequest request;
  request.set_id(id);
  return Unary<v1::CheckpointRequest, v1::CheckpointReply>(
      request, &v1::Control::Stub::Checkpoint);
}

absl::StatusOr<v1::DrainReply> ControlClient::Drain(const std::string& reason,
                                                    bool stop) {
  v1::DrainRequest request;
  request.set_stop(stop);
  request.set_reason(reason);
  return Unary<v1::DrainRequest, v1::DrainReply>(request,
                                                 &v1::Control::Stub::Drain);
}

absl::StatusOr<v1::DrainReply> ControlClient::Undrain() {
  return Unary<v1::UndrainRequest, v1::DrainReply>(v1::UndrainRequest(),
                                                   &v1::Control::Stub::Undrain);
}

absl::StatusOr<v1::VersionReply> ControlClient::Version() {
  return Unary<v1::VersionRequest, v1::VersionReply>(
      v1::VersionRequest(), &v1::Control::Stub::Version);
}

template <typename Reply>
absl::Status ControlClient::Drive(
    grpc::ClientContext& context,
    std::unique_ptr<grpc::ClientReader<Reply>> reader, int64_t deadline_ns,
    Interrupt& interrupt, const std::function<bool(const Reply&)>& on_message) {
  interrupt.Arm([&context] { context.TryCancel(); });
  Reply message;
  bool enough = false;
  while (!enough && reader->Read(&message)) enough = !on_message(message);
  if (enough) context.TryCancel();
  grpc::Status status = reader->Finish();
  interrupt.Arm(nullptr);
  if (enough) return absl::OkStatus();
  if (interrupt.raised()) return absl::CancelledError("interrupted");
  if (deadline_ns != 0 &&
      status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
    return absl::DeadlineExceededError("the time given has passed");
  }
  return Convert(status);
}

absl::Status ControlClient::Watch(
    uint64_t id, uint64_t from_step, int64_t deadline_ns, Interrupt& interrupt,
    const std::function<bool(const v1::WatchReply&)>& on_message) {
  grpc::ClientContext context;
  if (deadline_ns != 0) {
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::nanoseconds(deadline_ns - MonotonicNs()));
  }
  v1::WatchRequest request;
  request.set_id(id);
  request.set_from_step(from_step);
  return Drive<v1::WatchReply>(context, stub_->Watch(&context, request),
                               deadline_ns, interrupt, on_message);
}

absl::Status ControlClient::Logs(
    const v1::LogsRequest& request, Interrupt& interrupt,
    const std::function<bool(const v1::LogsReply&)>& on_message) {
  grpc::ClientContext context;
  return Drive<v1::LogsReply>(context, stub_->Logs(&context, request), 0,
                              interrupt, on_message);
}

absl::Status ControlClient::Trace(
    const v1::TraceRequest& request, Interrupt& interrupt,
    const std::function<bool(const v1::TraceReply&)>& on_message) {
  grpc::ClientContext context;
  return Drive<v1::TraceReply>(context, stub_->Trace(&context, request), 0,
                               interrupt, on_message);
}

}  // namespace slidedp::ctl
