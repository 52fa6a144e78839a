#include "hostd/daemon/job_state.h"

namespace slidedp::hostd {

bool HasEnded(v1::JobState state) {
  return state == v1::COMPLETED || state == v1::FAILED ||
         state == v1::CANCELLED;
}

bool IsActive(v1::JobState state) {
  return state == v1::CONFIGURING || state == v1::RUNNING ||
         state == v1::COMPLETING;
}

bool MayFollow(v1::JobState from, v1::JobState to) {
  if (to == v1::FAILED || to == v1::CANCELLED) {
    return from == v1::PENDING || IsActive(from);
  }
  // For another attempt.
  if (to == v1::PENDING) return IsActive(from);
  switch (from) {
    case v1::PENDING:
      return to == v1::CONFIGURING;
    case v1::CONFIGURING:
      // COMPLETING: an earlier attempt had put its output in place.
      return to == v1::RUNNING || to == v1::COMPLETING;
    case v1::RUNNING:
      return to == v1::COMPLETING;
    case v1::COMPLETING:
      return to == v1::COMPLETED;
    default:
      return false;
  }
}

Recovered RecoverActive(v1::JobState state, bool cancel_requested) {
  if (cancel_requested) {
    return {v1::CANCELLED,
            "cancelled; slidedpd stopped or was killed meanwhile"};
  }
  std::string reason =
      "slidedpd stopped or was killed while the job ran; submit it again";
  if (state == v1::COMPLETING) {
    reason += " (its output may be complete: look at the output folder)";
  }
  return {v1::FAILED, reason};
}

}  // namespace slidedp::hostd
