#include "worker/session/attachment.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/shm/fd_passing.h"
#include "common/shm/words.h"

namespace slidedp::session {
namespace {

using shm::SegmentKind;

constexpr int64_t kAttachTimeoutNs = 60'000'000'000;
// Reading or writing a model takes as long as its disk needs; a daemon that
// dies closes the socket.
constexpr int64_t kFilesTimeoutNs = int64_t{24} * 3600 * 1'000'000'000;

absl::Status Malformed(absl::string_view what) {
  return absl::InternalError(
      absl::StrCat("attach: ", what,
                   "; slidedpd and slidedp-worker must be of one release"));
}

// What a worker may get, by its name in policy::HostSegments.
const std::map<SegmentKind, const char*>& WorkerSegments() {
  static const std::map<SegmentKind, const char*> segments = {
      {SegmentKind::kParams, "params"},
      {SegmentKind::kGrads, "grads"},
      {SegmentKind::kVersions, "versions"},
      {SegmentKind::kReports, "reports"},
      {SegmentKind::kExchange, "exchange"}};
  return segments;
}

}  // namespace

absl::Status Attachment::Map(const v1::SegmentInfo& info, int fd,
                             uint64_t wanted_bytes) {
  auto kind = static_cast<SegmentKind>(info.kind());
  const char* name = WorkerSegments().at(kind);
  if (info.bytes() != wanted_bytes) {
    return Malformed(absl::StrCat("segment ", name, " has ", info.bytes(),
                                  " bytes, the plan says ", wanted_bytes));
  }
  shm::Access access =
      kind == SegmentKind::kParams || kind == SegmentKind::kVersions
          ? shm::Access::kReadOnly
          : shm::Access::kReadWrite;
  SDP_ASSIGN_OR_RETURN(shm::Mapping mapping,
                       shm::Mapping::Map(fd, info.bytes(), access, name));
  switch (kind) {
    case SegmentKind::kParams:
      params_ = std::move(mapping);
      break;
    case SegmentKind::kGrads:
      grads_ = std::move(mapping);
      break;
    case SegmentKind::kVersions:
      versions_ = std::move(mapping);
      break;
    case SegmentKind::kReports:
      reports_ = std::move(mapping);
      break;
    default:
      exchange_ = std::move(mapping);
      has_exchange_ = true;
  }
  return absl::OkStatus();
}

absl::Status Attachment::CheckWords(const model::StateLayout& layout,
                                    const policy::Plan& plan) const {
  shm::WordsHeader expected = {};
  expected.layout_version = shm::kWordsLayoutVersion;
  expected.world_size = static_cast<uint64_t>(plan.ranks);
  expected.units = layout.units.size();
  expected.buckets = policy::MakeGradBuckets(layout, plan).size();
  expected.rows = policy::ReportedRows(layout);
  expected.state_layout_hash = layout.hash;
  expected.plan_hash = policy::PlanHash(plan);
  // The segments are whole pages; the words in them end earlier.
  uint64_t versions_bytes =
      shm::Versions::Bytes(expected.world_size, expected.units);
  uint64_t reports_bytes =
      shm::Reports::Bytes(expected.world_size, expected.buckets, expected.rows);
  if (versions_.bytes() < versions_bytes || reports_.bytes() < reports_bytes) {
    return Malformed("a words segment is too short");
  }
  expected.magic = shm::kVersionsMagic;
  SDP_RETURN_IF_ERROR(
      shm::Versions::Check(versions_.data(), versions_bytes, expected));
  expected.magic = shm::kReportsMagic;
  return shm::Reports::Check(reports_.data(), reports_bytes, expected);
}

absl::StatusOr<Attachment> Attachment::Connect(const v1::Attach& attach,
                                               uint64_t job, uint32_t rank,
                                               const model::StateLayout& layout,
                                               const policy::Plan& plan) {
  Attachment attachment;
  SDP_ASSIGN_OR_RETURN(attachment.socket_,
                       shm::ConnectSeqpacket(attach.socket()));
  v1::AttachRequest request;
  request.set_job(job);
  request.set_rank(rank);
  request.set_nonce(attach.nonce());
  SDP_RETURN_IF_ERROR(shm::SendMessage(attachment.socket_.get(),
                                       request.SerializeAsString(), {}));
  SDP_ASSIGN_OR_RETURN(
      shm::Message message,
      shm::ReceiveMessage(attachment.socket_.get(), kAttachTimeoutNs));
  v1::AttachReply reply;
  if (!reply.ParseFromString(message.payload)) {
    return Malformed("the reply is not an AttachReply");
  }
  if (!reply.error().empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("attach: the daemon says: ", reply.error()));
  }
  if (static_cast<size_t>(reply.segments_size()) != message.fds.size()) {
    return Malformed(absl::StrCat(message.fds.size(), " descriptors for ",
                                  reply.segments_size(), " segments"));
  }
  // Every segment of the plan that a worker maps must come, once each.
  std::map<SegmentKind, uint64_t> wanted;
  const std::vector<policy::NamedBytes> segments =
      policy::HostSegments(layout, plan);
  for (const auto& [kind, name] : WorkerSegments()) {
    uint64_t bytes = policy::SegmentBytes(segments, name);
    if (bytes > 0) wanted[kind] = bytes;
  }
  for (int i = 0; i < reply.segments_size(); ++i) {
    const v1::SegmentInfo& info = reply.segments(i);
    auto found = wanted.find(static_cast<SegmentKind>(info.kind()));
    if (found == wanted.end()) {
      return Malformed(absl::StrCat("segment kind ", info.kind(),
                                    " is not expected, or came twice"));
    }
    SDP_RETURN_IF_ERROR(
        attachment.Map(info, message.fds[i].get(), found->second));
    wanted.erase(found);
  }
  if (!wanted.empty()) {
    return Malformed(absl::StrCat("segment ",
                                  WorkerSegments().at(wanted.begin()->first),
                                  " did not come"));
  }
  SDP_RETURN_IF_ERROR(attachment.CheckWords(layout, plan));
  return attachment;
}

absl::Status Attachment::PassFiles(v1::FilesMessage::Kind kind,
                                   const std::vector<std::string>& names,
                                   const std::vector<int>& fds) {
  if (names.empty() || names.size() != fds.size()) {
    return absl::InternalError("no files to pass, or names without files");
  }
  for (size_t begin = 0; begin < fds.size(); begin += shm::kMaxFdsPerMessage) {
    size_t end = std::min(begin + shm::kMaxFdsPerMessage, fds.size());
    v1::FilesMessage part;
    part.set_kind(kind);
    for (size_t i = begin; i < end; ++i) part.add_names(names[i]);
    part.set_last(end == fds.size());
    SDP_RETURN_IF_ERROR(
        shm::SendMessage(socket_.get(), part.SerializeAsString(),
                         {fds.begin() + static_cast<ptrdiff_t>(begin),
                          fds.begin() + static_cast<ptrdiff_t>(end)}));
  }
  return absl::OkStatus();
}

absl::Status Attachment::PassNone(v1::FilesMessage::Kind kind,
                                  const std::string& error) {
  v1::FilesMessage message;
  message.set_kind(kind);
  message.set_error(error);
  message.set_last(true);
  return shm::SendMessage(socket_.get(), message.SerializeAsString(), {});
}

absl::StatusOr<std::vector<std::string>> Attachment::AwaitFiles() {
  SDP_ASSIGN_OR_RETURN(shm::Message message,
                       shm::ReceiveMessage(socket_.get(), kFilesTimeoutNs));
  v1::FilesReply reply;
  if (!reply.ParseFromString(message.payload) || !message.fds.empty()) {
    return Malformed("the reply is not a FilesReply");
  }
  if (!reply.error().empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("the daemon says: ", reply.error()));
  }
  return std::vector<std::string>(reply.warnings().begin(),
                                  reply.warnings().end());
}

}  // namespace slidedp::session
