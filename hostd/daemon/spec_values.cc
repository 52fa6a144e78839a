#include "hostd/daemon/spec_values.h"

#include "absl/strings/str_cat.h"
#include "common/base/status.h"

namespace slidedp::hostd {
namespace {

constexpr size_t kMaxPathBytes = 4096;

}  // namespace

absl::Status Bad(absl::string_view field, absl::string_view value,
                 absl::string_view problem, absl::string_view remedy) {
  return InvalidInput("job spec", field, value, problem, remedy);
}

absl::Status CheckCount(absl::string_view field, uint64_t value, uint64_t least,
                        uint64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return Bad(field, absl::StrCat(value), "out of range",
             absl::StrCat("choose ", least, " to ", most));
}

absl::Status CheckNumber(absl::string_view field, double value, double least,
                         double most, bool positive) {
  if (value >= least && value <= most && !(positive && value == least)) {
    return absl::OkStatus();
  }
  return Bad(field, absl::StrCat(value), "out of range",
             absl::StrCat("choose a number ", positive ? "above " : "from ",
                          least, " up to ", most));
}

absl::Status CheckText(absl::string_view field, absl::string_view text,
                       size_t max_bytes) {
  if (text.empty()) return Bad(field, "", "missing", "set it");
  if (text.size() > max_bytes) {
    return Bad(field, text, "too long",
               absl::StrCat("use at most ", max_bytes, " bytes"));
  }
  for (char c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      return Bad(field, text, "holds a control character", "leave it out");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckPath(absl::string_view field, absl::string_view path) {
  SDP_RETURN_IF_ERROR(CheckText(field, path, kMaxPathBytes));
  if (path[0] != '/') {
    return Bad(field, path, "not an absolute path", "let slidedpctl submit it");
  }
  return absl::OkStatus();
}

}  // namespace slidedp::hostd
