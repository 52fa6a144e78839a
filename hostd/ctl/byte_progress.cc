#include "hostd/ctl/byte_progress.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "common/base/clock.h"
#include "common/base/units.h"

namespace slidedp::ctl {
namespace {

constexpr int64_t kRedrawNs = 100'000'000;
constexpr char kEraseLine[] = "\r\x1b[K";

}  // namespace

ByteProgress::ByteProgress(const Environment& environment, std::string what,
                           uint64_t total_bytes)
    : environment_(environment),
      what_(std::move(what)),
      total_bytes_(total_bytes) {}

ByteProgress::~ByteProgress() {
  if (shown_ns_ != 0) *environment_.err << kEraseLine << std::flush;
}

std::string ByteProgress::Line(const std::string& what, uint64_t done_bytes,
                               uint64_t total_bytes) {
  const double share = total_bytes == 0 ? 1
                                        : static_cast<double>(done_bytes) /
                                              static_cast<double>(total_bytes);
  return absl::StrFormat("%s  %3.0f %%  %s of %s", what, 100 * share,
                         FormatBytes(done_bytes), FormatBytes(total_bytes));
}

void ByteProgress::Add(uint64_t bytes) {
  done_bytes_ += bytes;
  if (!environment_.err_is_terminal) return;
  const int64_t now_ns = MonotonicNs();
  if (shown_ns_ != 0 && now_ns - shown_ns_ < kRedrawNs) return;
  shown_ns_ = now_ns;
  *environment_.err << kEraseLine << Line(what_, done_bytes_, total_bytes_)
                    << std::flush;
}

}  // namespace slidedp::ctl
