#include "common/base/units.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace slidedp {

std::string FormatBytes(uint64_t bytes) {
  if (bytes < kKiB) return absl::StrCat(bytes, " B");
  static constexpr const char* kUnits[] = {"KiB", "MiB", "GiB",
                                           "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes) / 1024.0;
  size_t unit = 0;
  // 1023.995 would print as 1024.00.
  while (value >= 1023.995 && unit + 1 < std::size(kUnits)) {
    value /= 1024.0;
    ++unit;
  }
  return absl::StrFormat("%.2f %s", value, kUnits[unit]);
}

std::string FormatSeconds(double seconds) {
  if (!std::isfinite(seconds)) return "unknown";
  if (seconds < 0) return "-" + FormatSeconds(-seconds);
  if (seconds < 59.95) return absl::StrFormat("%.1fs", seconds);
  if (seconds < 3599.5) {
    const auto whole = static_cast<int64_t>(std::llround(seconds));
    return absl::StrFormat("%dm%02ds", whole / 60, whole % 60);
  }
  if (seconds > 1e15) return absl::StrFormat("%.3gs", seconds);
  const auto minutes = static_cast<int64_t>(std::llround(seconds / 60));
  return absl::StrFormat("%dh%02dm", minutes / 60, minutes % 60);
}

}  // namespace slidedp
