// Single values of a submitted job spec: in range, or an error that names the
// field.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace slidedp::hostd {

absl::Status Bad(absl::string_view field, absl::string_view value,
                 absl::string_view problem, absl::string_view remedy);
absl::Status CheckCount(absl::string_view field, uint64_t value, uint64_t least,
                        uint64_t most);
// NaN is outside of every range. The upper end is included; the lower one
// unless `positive`.
absl::Status CheckNumber(absl::string_view field, double value, double least,
                         double most, bool positive = false);
// One line, not empty.
absl::Status CheckText(absl::string_view field, absl::string_view text,
                       size_t max_bytes);
absl::Status CheckPath(absl::string_view field, absl::string_view path);

}  // namespace slidedp::hostd
