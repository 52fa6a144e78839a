// Who may do what: the one place that decides.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "hostd/server/identity.h"

namespace slidedp::hostd {

enum class Verb {
  kVersion,
  kSubmit,
  kList,  // the queue; others' jobs redacted (SeesAll)
  kGet,   // one job, all of it; Watch too
  kLogs,
  kCancel,
  kCheckpoint,
  kJoin,   // a worker's session and attach connection
  kDrain,  // and undrain
};

// `owner`: uid of the job concerned; none for the verbs that concern none.
absl::Status Authorize(const Identity& identity, Verb verb,
                       std::optional<uint32_t> owner);

// Whether the identity sees name, reason and loss of a job of `owner` in the
// queue.
bool SeesAll(const Identity& identity, uint32_t owner);

}  // namespace slidedp::hostd
