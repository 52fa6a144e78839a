// NCCL errors as absl::Status. Private to this folder.
#pragma once

#include <nccl.h>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"

namespace slidedp::collective {

// `comm` may be null.
inline absl::Status NcclStatus(ncclResult_t result, ncclComm_t comm,
                               absl::string_view what) {
  if (result == ncclSuccess || result == ncclInProgress) {
    return absl::OkStatus();
  }
  std::string text = absl::StrCat(what, ": NCCL: ", ncclGetErrorString(result));
  const char* last = ncclGetLastError(comm);
  if (last != nullptr && *last != '\0') absl::StrAppend(&text, ": ", last);
  switch (result) {
    case ncclInvalidArgument:
    case ncclInvalidUsage:
      return absl::InvalidArgumentError(text);
    case ncclRemoteError:
      return absl::UnavailableError(text);
    default:
      return absl::InternalError(text);
  }
}

}  // namespace slidedp::collective
