#include "hostd/server/authorize.h"

#include "absl/strings/str_cat.h"

namespace slidedp::hostd {

absl::Status Authorize(const Identity& identity, Verb verb,
                       std::optional<uint32_t> owner) {
  const bool is_owner = owner && *owner == identity.uid;
  switch (verb) {
    case Verb::kVersion:
    case Verb::kSubmit:
    case Verb::kList:
      return absl::OkStatus();
    case Verb::kGet:
    case Verb::kLogs:
    case Verb::kCancel:
    case Verb::kCheckpoint:
      if (is_owner || (owner && identity.is_admin)) return absl::OkStatus();
      return absl::PermissionDeniedError(
          absl::StrCat("it is another user's job, and ", identity.user,
                       " is no administrator"));
    case Verb::kJoin:
      // Not even an administrator: a rank computes with its user's rights.
      if (is_owner) return absl::OkStatus();
      return absl::PermissionDeniedError(
          "only workers of the job's own user may join it");
    case Verb::kDrain:
      if (identity.is_admin) return absl::OkStatus();
      return absl::PermissionDeniedError(absl::StrCat(
          "only an administrator may drain, and ", identity.user, " is none"));
  }
  return absl::InternalError("unknown verb");
}

bool SeesAll(const Identity& identity, uint32_t owner) {
  return identity.is_admin || identity.uid == owner;
}

}  // namespace slidedp::hostd
