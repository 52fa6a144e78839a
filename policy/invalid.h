// A choice that policy refuses. Its file is the caller's to name.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/base/status.h"

namespace slidedp::policy {

inline absl::Status Invalid(absl::string_view field, int64_t value,
                            absl::string_view problem,
                            absl::string_view remedy) {
  return InvalidInput("", field, absl::StrCat(value), problem, remedy);
}

}  // namespace slidedp::policy
