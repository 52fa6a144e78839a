// Shared-memory segments: sealed memfds wrapped in Boost.Interprocess mapped
// regions (architecture section 3). A segment has no name in the file system;
// it is gone with its last holder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/base/fd.h"

namespace slidedp::shm {

enum class SegmentKind : uint32_t {
  kParams = 1,    // hi planes; daemon writes, workers read
  kState = 2,     // lo, m, v; the daemon's alone
  kGrads = 3,     // reduced gradients; workers write, daemon reads
  kVersions = 4,  // daemon's words; workers read
  kReports = 5,   // ranks' words; workers write, daemon reads
  kExchange = 6,  // CPU ranks' collective; workers read and write
};
absl::string_view SegmentKindName(SegmentKind kind);

enum class Access { kReadOnly, kReadWrite };

// A mapping of a whole segment into this process. Move-only.
class Mapping {
 public:
  static absl::StatusOr<Mapping> Map(int fd, uint64_t bytes, Access access,
                                     absl::string_view name);
  Mapping();
  Mapping(Mapping&&) noexcept;
  Mapping& operator=(Mapping&&) noexcept;
  ~Mapping();

  void* data() const;
  uint64_t bytes() const;
  template <typename T>
  T* at(uint64_t offset_bytes) const {
    return reinterpret_cast<T*>(static_cast<char*>(data()) + offset_bytes);
  }

 private:
  struct Region;
  std::unique_ptr<Region> region_;
};

// The creating side. Pages are reserved before Create returns, the
// inode is 0600, the size is sealed, and for kParams and kVersions new writable
// mappings are sealed off once the daemon has its own. Contents are zero.
class Segment {
 public:
  // `place` is called before a page is reserved, with the mapping: a memory
  // policy that it sets there (mbind) is the inode's, so that reserving obeys
  // it.
  using Place = std::function<void(const Mapping& mapping)>;
  static absl::StatusOr<Segment> Create(SegmentKind kind, uint64_t bytes,
                                        absl::string_view job,
                                        const Place& place = nullptr);
  Segment() = default;
  Segment(Segment&&) noexcept = default;
  Segment& operator=(Segment&&) noexcept = default;

  SegmentKind kind() const { return kind_; }
  int fd() const { return fd_.get(); }
  // A descriptor to hand to a worker: read-only for kParams and kVersions, an
  // error for kState.
  absl::StatusOr<UniqueFd> WorkerFd() const;
  uint64_t bytes() const { return mapping_.bytes(); }
  const Mapping& mapping() const { return mapping_; }

 private:
  SegmentKind kind_ = SegmentKind::kParams;
  UniqueFd fd_;
  Mapping mapping_;
};

}  // namespace slidedp::shm
