// Messages with descriptors over a SOCK_SEQPACKET Unix socket (SCM_RIGHTS).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/fd.h"

namespace slidedp::shm {

inline constexpr size_t kMaxFdsPerMessage = 253;
inline constexpr size_t kMaxMessageBytes = 256 * 1024;
// How long sending and connecting wait for a peer that takes nothing.
inline constexpr int64_t kSendTimeoutNs = 10'000'000'000;

struct Message {
  std::string payload;
  std::vector<UniqueFd> fds;
};

// One packet of 1 to kMaxMessageBytes. `fds` are borrowed. UnavailableError:
// the peer left.
absl::Status SendMessage(int socket, absl::string_view payload,
                         const std::vector<int>& fds);
// Waits at most `timeout_ns` for one packet. Received descriptors are
// close-on-exec; a truncated message is an error and leaks none. An orderly
// close is CancelledError, no packet in time DeadlineExceededError.
absl::StatusOr<Message> ReceiveMessage(int socket, int64_t timeout_ns);

// Client side: connects to a SOCK_SEQPACKET socket at `path`.
absl::StatusOr<UniqueFd> ConnectSeqpacket(const std::string& path);

}  // namespace slidedp::shm
