// Status macros and helpers. Every module boundary returns absl::Status or
// absl::StatusOr; no exceptions cross one.
#pragma once

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace slidedp {

// Same code, message "context: message". Ok stays ok.
absl::Status Annotate(const absl::Status& status, absl::string_view context);

// The absl code that fits `error_number` (ENOSPC -> ResourceExhausted,
// EACCES -> PermissionDenied ...), message "what: strerror".
absl::Status ErrnoStatus(int error_number, absl::string_view what);

// Bad input from a user, in the one form that all parsers use:
// "FILE: FIELD = VALUE: PROBLEM; REMEDY". Empty parts are left out.
absl::Status InvalidInput(absl::string_view file, absl::string_view field,
                          absl::string_view value, absl::string_view problem,
                          absl::string_view remedy);

}  // namespace slidedp

#define SDP_CONCAT_INNER(a, b) a##b
#define SDP_CONCAT(a, b) SDP_CONCAT_INNER(a, b)

#define SDP_RETURN_IF_ERROR(expr)                                              \
  do {                                                                         \
    if (absl::Status sdp_status = (expr); !sdp_status.ok()) return sdp_status; \
  } while (false)

#define SDP_ASSIGN_OR_RETURN_INNER(tmp, lhs, expr) \
  auto tmp = (expr);                               \
  if (!tmp.ok()) return std::move(tmp).status();   \
  lhs = std::move(tmp).value()
#define SDP_ASSIGN_OR_RETURN(lhs, expr) \
  SDP_ASSIGN_OR_RETURN_INNER(SDP_CONCAT(sdp_or_, __LINE__), lhs, expr)
