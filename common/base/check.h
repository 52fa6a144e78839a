// SDP_CHECK(condition, "message"): aborts with file, line and message. For our
// own bugs only; bad input gets a Status.
#pragma once

#include "absl/strings/string_view.h"

namespace slidedp {
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition,
                              absl::string_view message);
}  // namespace slidedp

#define SDP_CHECK(condition, message)                                    \
  do {                                                                   \
    if (!(condition))                                                    \
      ::slidedp::CheckFailed(__FILE__, __LINE__, #condition, (message)); \
  } while (false)
