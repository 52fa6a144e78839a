// The only file that knows Boost.Interprocess: a memfd needs a class of its
// own to be mapped, and the handle type of that protocol is in `ipcdetail`.
#include <cstddef>
#include <limits>
#include <utility>

#include "boost/interprocess/mapped_region.hpp"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/shm/segment.h"

namespace slidedp::shm {
namespace {

namespace ipc = boost::interprocess;

// What mapped_region asks of a memory-mappable object. Borrows the descriptor.
class MemfdMappable {
 public:
  MemfdMappable(int fd, ipc::mode_t mode) : fd_(fd), mode_(mode) {}
  ipc::mapping_handle_t get_mapping_handle() const {
    return ipc::ipcdetail::mapping_handle_from_file_handle(fd_);
  }
  ipc::mode_t get_mode() const { return mode_; }

 private:
  int fd_;
  ipc::mode_t mode_;
};

}  // namespace

struct Mapping::Region {
  ipc::mapped_region mapped;
};

Mapping::Mapping() = default;
Mapping::Mapping(Mapping&&) noexcept = default;
Mapping& Mapping::operator=(Mapping&&) noexcept = default;
Mapping::~Mapping() = default;

void* Mapping::data() const {
  return region_ == nullptr ? nullptr : region_->mapped.get_address();
}

uint64_t Mapping::bytes() const {
  return region_ == nullptr ? 0 : region_->mapped.get_size();
}

absl::StatusOr<Mapping> Mapping::Map(int fd, uint64_t bytes, Access access,
                                     absl::string_view name) {
  SDP_ASSIGN_OR_RETURN(const uint64_t actual, RegularFileBytes(fd, name));
  // A mapping beyond the end would give SIGBUS at the first touch.
  if (actual != bytes || bytes == 0 ||
      bytes > std::numeric_limits<ptrdiff_t>::max()) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": the segment is ", actual, " bytes, not ", bytes));
  }
  const ipc::mode_t mode =
      access == Access::kReadOnly ? ipc::read_only : ipc::read_write;
  try {
    Mapping mapping;
    mapping.region_ = std::make_unique<Region>(
        Region{ipc::mapped_region(MemfdMappable(fd, mode), mode, 0, bytes)});
    return mapping;
  } catch (const ipc::interprocess_exception& error) {
    return ErrnoStatus(
        error.get_native_error(),
        absl::StrCat(
            name, ": mapping ", FormatBytes(bytes),
            access == Access::kReadOnly ? " for reading" : " for writing"));
  }
}

}  // namespace slidedp::shm
