#include "common/shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <limits>
#include <thread>
#include <utility>
#include <vector>

#include "common/base/memory.h"
#include "common/base/status.h"
#include "common/base/units.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace slidedp::shm {
namespace {

// Interrupted by a signal, one reservation starts over; so it goes in pieces.
constexpr uint64_t kReservePieceBytes = kGiB;
// From here on several threads reserve, piece by piece.
constexpr uint64_t kParallelBytes = kGiB;
constexpr uint64_t kPopulatePieceBytes = 64 * kMiB;
constexpr uint64_t kMaxReserveThreads = 16;
constexpr size_t kMaxJobNameBytes = 128;  // a memfd's name has at most 249

bool WorkersOnlyRead(SegmentKind kind) {
  return kind == SegmentKind::kParams || kind == SegmentKind::kVersions;
}

absl::StatusOr<UniqueFd> NewMemfd(const std::string& name) {
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  UniqueFd fd(memfd_create(name.c_str(), flags | MFD_NOEXEC_SEAL));
  if (!fd.valid() && errno == EINVAL) {  // Linux before 6.3
    fd = UniqueFd(memfd_create(name.c_str(), flags));
  }
  if (!fd.valid()) {
    return ErrnoStatus(errno, absl::StrCat(name, ": memfd_create"));
  }
  return fd;
}

absl::Status NoRoom(absl::string_view name, uint64_t bytes,
                    absl::string_view why) {
  return absl::ResourceExhaustedError(
      absl::StrCat(name, ": ", FormatBytes(bytes), " (", bytes,
                   " bytes) of shared memory can't be reserved: ", why));
}

// The kernel reserves shared memory beyond what is there, until it kills
// somebody. So the room is looked up first.
absl::Status CheckRoom(absl::string_view name, uint64_t bytes) {
  SDP_ASSIGN_OR_RETURN(const MemoryRoom room, AvailableMemory());
  if (bytes <= room.bytes) return absl::OkStatus();
  return NoRoom(name, bytes,
                absl::StrCat("only ", FormatBytes(room.bytes), " are left by ",
                             room.limit));
}

absl::Status Reserve(int fd, absl::string_view name, uint64_t bytes) {
  for (uint64_t offset = 0; offset < bytes;) {
    const uint64_t piece = std::min(kReservePieceBytes, bytes - offset);
    if (fallocate(fd, 0, static_cast<off_t>(offset),
                  static_cast<off_t>(piece)) == 0) {
      offset += piece;
      continue;
    }
    const int error_number = errno;
    if (error_number == EINTR) continue;
    if (error_number != ENOSPC && error_number != ENOMEM) {
      return ErrnoStatus(error_number, absl::StrCat(name, ": fallocate"));
    }
    const absl::StatusOr<MemoryRoom> room = AvailableMemory();
    return NoRoom(
        name, bytes,
        absl::StrCat("the kernel refused at ", FormatBytes(offset),
                     room.ok() ? absl::StrCat("; ", FormatBytes(room->bytes),
                                              " are left by ", room->limit)
                               : std::string()));
  }
  return absl::OkStatus();
}

// The same for much memory, which one thread would take a minute to clear
// (fallocate holds the file's lock, so only faults can be shared out). Pages
// are mapped on the way, as the loader and the update workers need them anyway.
// Unimplemented before Linux 5.14: the caller reserves otherwise.
absl::Status ReserveInParallel(const Mapping& mapping, absl::string_view name) {
  const uint64_t pieces = CeilDiv(mapping.bytes(), kPopulatePieceBytes);
  std::atomic<uint64_t> next{0};
  std::atomic<int> failure{0};
  auto work = [&] {
    for (uint64_t i = next++; i < pieces && failure == 0;) {
      const uint64_t offset = i * kPopulatePieceBytes;
      if (madvise(mapping.at<char>(offset),
                  std::min(kPopulatePieceBytes, mapping.bytes() - offset),
                  MADV_POPULATE_WRITE) == 0) {
        i = next++;
      } else if (errno != EINTR && errno != EAGAIN) {
        failure = errno;
      }
    }
  };
  std::vector<std::thread> threads;
  const uint64_t count =
      std::min({kMaxReserveThreads, pieces,
                uint64_t{std::max(1u, std::thread::hardware_concurrency())}});
  for (uint64_t i = 1; i < count; ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  switch (failure.load()) {
    case 0:
      return absl::OkStatus();
    case EINVAL:
      return absl::UnimplementedError("MADV_POPULATE_WRITE");
    default:
      return NoRoom(name, mapping.bytes(),
                    ErrnoStatus(failure, "the kernel refused").message());
  }
}

absl::Status ReservePages(int fd, absl::string_view name,
                          const Mapping& mapping) {
  if (mapping.bytes() >= kParallelBytes) {
    absl::Status status = ReserveInParallel(mapping, name);
    if (!absl::IsUnimplemented(status)) return status;
  }
  return Reserve(fd, name, mapping.bytes());
}

absl::Status Seal(int fd, absl::string_view name, SegmentKind kind) {
  int seals = F_SEAL_SHRINK | F_SEAL_GROW;
  // Existing writable mappings, the daemon's, keep working.
  if (WorkersOnlyRead(kind)) seals |= F_SEAL_FUTURE_WRITE;
  if (fcntl(fd, F_ADD_SEALS, seals) != 0 ||
      fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL) != 0) {
    return ErrnoStatus(errno, absl::StrCat(name, ": F_ADD_SEALS"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::string_view SegmentKindName(SegmentKind kind) {
  switch (kind) {
    case SegmentKind::kParams:
      return "params";
    case SegmentKind::kState:
      return "state";
    case SegmentKind::kGrads:
      return "grads";
    case SegmentKind::kVersions:
      return "versions";
    case SegmentKind::kReports:
      return "reports";
    case SegmentKind::kExchange:
      return "exchange";
  }
  return "unknown";
}

absl::StatusOr<Segment> Segment::Create(SegmentKind kind, uint64_t bytes,
                                        absl::string_view job,
                                        const Place& place) {
  const std::string name = absl::StrCat("slidedp-", SegmentKindName(kind), "-",
                                        job.substr(0, kMaxJobNameBytes));
  if (bytes == 0 || bytes > std::numeric_limits<off_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": ", bytes, " bytes is no segment size"));
  }
  SDP_RETURN_IF_ERROR(CheckRoom(name, bytes));

  Segment segment;
  segment.kind_ = kind;
  SDP_ASSIGN_OR_RETURN(segment.fd_, NewMemfd(name));
  const int fd = segment.fd_.get();
  // A memfd starts as 0777: whoever holds a read-only descriptor could open it
  // again for writing through /proc.
  if (fchmod(fd, 0600) != 0) {
    return ErrnoStatus(errno, absl::StrCat(name, ": fchmod"));
  }
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    return ErrnoStatus(
        errno, absl::StrCat(name, ": ftruncate to ", FormatBytes(bytes)));
  }
  SDP_ASSIGN_OR_RETURN(segment.mapping_,
                       Mapping::Map(fd, bytes, Access::kReadWrite, name));
  if (place) place(segment.mapping_);
  SDP_RETURN_IF_ERROR(ReservePages(fd, name, segment.mapping_));
  SDP_RETURN_IF_ERROR(Seal(fd, name, kind));
  return segment;
}

absl::StatusOr<UniqueFd> Segment::WorkerFd() const {
  const absl::string_view name = SegmentKindName(kind_);
  if (!fd_.valid()) {
    return absl::FailedPreconditionError("no segment was created");
  }
  if (kind_ == SegmentKind::kState) {
    return absl::PermissionDeniedError(
        "the state segment is never handed to a worker");
  }
  if (WorkersOnlyRead(kind_)) {
    // A duplicate would share the writable open file description.
    return OpenFile(absl::StrCat("/proc/self/fd/", fd_.get()), O_RDONLY);
  }
  UniqueFd copy(fcntl(fd_.get(), F_DUPFD_CLOEXEC, 0));
  if (!copy.valid()) return ErrnoStatus(errno, absl::StrCat(name, ": dup"));
  return copy;
}

}  // namespace slidedp::shm
