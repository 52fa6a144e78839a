#include "common/base/status.h"

#include <cerrno>
#include <cstdio>
#include <system_error>

namespace slidedp {
namespace {

constexpr size_t kMaxShownBytes = 256;

absl::StatusCode CodeOfErrno(int error_number) {
  switch (error_number) {
    case 0:
      return absl::StatusCode::kInternal;
    case ENOMEM:
    case ENOBUFS:
    case ENOSPC:
    case EDQUOT:
    case EMFILE:
    case ENFILE:
      return absl::StatusCode::kResourceExhausted;
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::StatusCode::kPermissionDenied;
    case ETIMEDOUT:
      return absl::StatusCode::kDeadlineExceeded;
    case EPIPE:
    case ECONNRESET:
    case ECONNREFUSED:
      return absl::StatusCode::kUnavailable;
    case EIO:
      return absl::StatusCode::kDataLoss;
    default:
      return absl::ErrnoToStatusCode(error_number);
  }
}

// User text in a message: one line, bounded, no terminal control bytes.
std::string Printable(absl::string_view text) {
  std::string shown;
  for (char c : text.substr(0, kMaxShownBytes)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      char escaped[5];
      std::snprintf(escaped, sizeof(escaped), "\\x%02x", byte);
      shown += escaped;
    } else {
      shown += c;
    }
  }
  if (text.size() > kMaxShownBytes) shown += "...";
  return shown;
}

}  // namespace

absl::Status Annotate(const absl::Status& status, absl::string_view context) {
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat(context, ": ", status.message()));
}

absl::Status ErrnoStatus(int error_number, absl::string_view what) {
  return absl::Status(
      CodeOfErrno(error_number),
      absl::StrCat(what, ": ", std::generic_category().message(error_number)));
}

absl::Status InvalidInput(absl::string_view file, absl::string_view field,
                          absl::string_view value, absl::string_view problem,
                          absl::string_view remedy) {
  std::string message = Printable(file);
  std::string subject = Printable(field);
  if (!value.empty()) {
    absl::StrAppend(&subject, subject.empty() ? "" : " = ", Printable(value));
  }
  for (absl::string_view part : {absl::string_view(subject), problem}) {
    if (part.empty()) continue;
    absl::StrAppend(&message, message.empty() ? "" : ": ", part);
  }
  if (!remedy.empty()) {
    absl::StrAppend(&message, message.empty() ? "" : "; ", remedy);
  }
  return absl::InvalidArgumentError(message);
}

}  // namespace slidedp
