// Which checkpoint a job goes on from: rank 0, as the user, looks at the
// folders and passes the daemon one after another until one is good.
#pragma once

#include <deque>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "common/checkpoint/manifest.h"
#include "worker/session/attachment.h"
#include "worker/session/proposal.h"

namespace slidedp::session {

class Resume {
 public:
  // `from`: v1::Propose.resume, not empty.
  static absl::StatusOr<Resume> Find(const Proposal& proposal,
                                     const std::string& from);

  // Passes the first candidate that looks whole, or says that there is none.
  absl::Status PassNext(Attachment& attachment);
  // The daemon's answer was this error to the one passed last. Ok: another one
  // may be good.
  absl::Status OnRefused(const absl::Status& error);
  // The one passed last was good, or none was passed. Later ones of the job's
  // folder are set aside.
  absl::Status OnLoaded() const;

 private:
  explicit Resume(const Proposal& proposal) : proposal_(&proposal) {}
  absl::StatusOr<checkpoint::Manifest> Look(const std::string& path) const;

  const Proposal* proposal_;
  bool automatic_ = false;  // not one that the user named
  std::deque<std::string> candidates_;
  std::string passed_;  // path; empty: none
  uint64_t passed_step_ = 0;
  std::optional<absl::Status> refused_;  // the last one's fault
};

}  // namespace slidedp::session
