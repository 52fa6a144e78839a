// The rank's side of the attach socket: the job's segments, mapped, and the
// passing of files to the daemon.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/fd.h"
#include "common/model/layout.h"
#include "common/shm/segment.h"
#include "policy/plan.h"
#include "proto/control.pb.h"

namespace slidedp::session {

class Attachment {
 public:
  // Connects to `attach.socket()`, proves who we are with the nonce, and maps
  // what comes: sizes must be the plan's to the byte, the words' headers must
  // name this layout and plan. `params` and `versions` are mapped read-only.
  static absl::StatusOr<Attachment> Connect(const v1::Attach& attach,
                                            uint64_t job, uint32_t rank,
                                            const model::StateLayout& layout,
                                            const policy::Plan& plan);

  const shm::Mapping& params() const { return params_; }
  const shm::Mapping& grads() const { return grads_; }
  const shm::Mapping& versions() const { return versions_; }
  const shm::Mapping& reports() const { return reports_; }
  // Null when the plan needs no exchange among CPU ranks.
  const shm::Mapping* exchange() const {
    return has_exchange_ ? &exchange_ : nullptr;
  }

  // Rank 0. Passes the files, in parts; the daemon then reads or writes them.
  absl::Status PassFiles(v1::FilesMessage::Kind kind,
                         const std::vector<std::string>& names,
                         const std::vector<int>& fds);
  // Says that there are none, or why there are none.
  absl::Status PassNone(v1::FilesMessage::Kind kind, const std::string& error);
  // Waits until the daemon has done so; its warnings come back.
  absl::StatusOr<std::vector<std::string>> AwaitFiles();

 private:
  Attachment() = default;
  absl::Status Map(const v1::SegmentInfo& info, int fd, uint64_t wanted_bytes);
  absl::Status CheckWords(const model::StateLayout& layout,
                          const policy::Plan& plan) const;

  UniqueFd socket_;
  shm::Mapping params_, grads_, versions_, reports_, exchange_;
  bool has_exchange_ = false;
};

}  // namespace slidedp::session
