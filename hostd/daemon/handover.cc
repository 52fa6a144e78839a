#include "hostd/daemon/handover.h"

#include <fcntl.h>

#include <limits>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/shm/fd_passing.h"
#include "hostd/daemon/log_lines.h"

namespace slidedp::hostd {
namespace {

constexpr size_t kMaxFiles = 4096;
constexpr size_t kMaxNameBytes = 255;
constexpr size_t kMaxErrorBytes = 1000;

absl::Status Invalid(absl::string_view field, absl::string_view value,
                     absl::string_view problem) {
  return InvalidInput("attach connection", field, value, problem, "");
}

}  // namespace

absl::Status SendSegments(int socket,
                          const std::vector<shm::Segment>& segments) {
  v1::AttachReply reply;
  std::vector<UniqueFd> owned;
  std::vector<int> fds;
  for (const shm::Segment& segment : segments) {
    if (segment.kind() == shm::SegmentKind::kState) continue;
    SDP_ASSIGN_OR_RETURN(UniqueFd fd, segment.WorkerFd());
    v1::SegmentInfo* info = reply.add_segments();
    info->set_kind(static_cast<uint32_t>(segment.kind()));
    info->set_bytes(segment.bytes());
    fds.push_back(fd.get());
    owned.push_back(std::move(fd));
  }
  return shm::SendMessage(socket, reply.SerializeAsString(), fds);
}

absl::Status SendAttachError(int socket, const std::string& error) {
  v1::AttachReply reply;
  reply.set_error(error);
  return shm::SendMessage(socket, reply.SerializeAsString(), {});
}

absl::StatusOr<NamedFiles> ReceiveFiles(int socket, v1::FilesMessage::Kind kind,
                                        bool may_be_empty) {
  NamedFiles files;
  while (true) {
    // No deadline: the lease of the rank ends it by shutting the socket down.
    SDP_ASSIGN_OR_RETURN(
        shm::Message message,
        shm::ReceiveMessage(socket, std::numeric_limits<int64_t>::max()));
    v1::FilesMessage part;
    if (!part.ParseFromString(message.payload)) {
      return Invalid("FilesMessage", "", "can't be read");
    }
    if (part.kind() != kind) {
      return Invalid("FilesMessage.kind", absl::StrCat(part.kind()),
                     absl::StrCat("expected ", kind));
    }
    if (!part.error().empty()) {
      return absl::FailedPreconditionError(
          ToValidUtf8(part.error().substr(0, kMaxErrorBytes)));
    }
    if (static_cast<size_t>(part.names_size()) != message.fds.size()) {
      return Invalid("FilesMessage.names",
                     absl::StrCat(part.names_size(), " names"),
                     absl::StrCat("with ", message.fds.size(), " descriptors"));
    }
    if (files.size() + message.fds.size() > kMaxFiles) {
      return Invalid("FilesMessage.names", absl::StrCat(files.size(), " files"),
                     absl::StrCat("more than ", kMaxFiles));
    }
    for (size_t i = 0; i < message.fds.size(); ++i) {
      const std::string& name = part.names(static_cast<int>(i));
      if (name.empty() || name.size() > kMaxNameBytes ||
          name.find('/') != std::string::npos) {
        return Invalid("FilesMessage.names", name, "not a file's name");
      }
      SDP_RETURN_IF_ERROR(
          RegularFileBytes(message.fds[i].get(), name).status());
      files.emplace_back(name, std::move(message.fds[i]));
    }
    if (part.last()) break;
    if (part.names_size() == 0) {
      return Invalid("FilesMessage.names", "", "a part without files");
    }
  }
  if (files.empty() && !may_be_empty) {
    return Invalid("FilesMessage.names", "", "no files");
  }
  return files;
}

absl::Status SendFilesReply(int socket, const absl::Status& status,
                            const std::vector<std::string>& warnings) {
  v1::FilesReply reply;
  reply.set_done(true);
  if (status.ok()) {
    for (const std::string& warning : warnings) reply.add_warnings(warning);
  } else {
    reply.set_error(std::string(status.message()));
  }
  return shm::SendMessage(socket, reply.SerializeAsString(), {});
}

absl::StatusOr<std::vector<int>> MatchOutput(const model::TensorSource& source,
                                             const NamedFiles& output) {
  std::vector<int> fds;
  for (const model::SourceFile& file : source.files()) {
    const UniqueFd* match = nullptr;
    for (const auto& [name, fd] : output) {
      if (name != file.name) continue;
      if (match != nullptr) return Invalid("output", name, "passed twice");
      match = &fd;
    }
    if (match == nullptr) {
      return Invalid("output", file.name, "not passed");
    }
    int flags = fcntl(match->get(), F_GETFL);
    if (flags < 0 || (flags & O_ACCMODE) == O_RDONLY ||
        (flags & (O_PATH | O_APPEND)) != 0) {
      return Invalid("output", file.name, "not open for writing at offsets");
    }
    SDP_ASSIGN_OR_RETURN(uint64_t bytes,
                         RegularFileBytes(match->get(), file.name));
    if (bytes != file.header.file_bytes) {
      return Invalid("output", file.name,
                     absl::StrCat("has ", bytes, " bytes, the source's ",
                                  file.header.file_bytes));
    }
    fds.push_back(match->get());
  }
  if (output.size() != fds.size()) {
    return Invalid("output", absl::StrCat(output.size(), " files"),
                   absl::StrCat("the source has ", fds.size()));
  }
  return fds;
}

}  // namespace slidedp::hostd
