// Collective over NCCL, between processes that hold one GPU each.
//
// Sums: FP32 in the order NCCL's algorithm takes, which is the same in every
// run of the same ranks, sizes and topology. BF16 sums are rounded at every
// addition, so with more than two ranks they are less exact than collective.h
// says of the shared-memory implementation; the FP32 routes round once.
//
// A rank that never arrives does not fail an operation that the GPU has begun:
// the kernel waits. Check() tells, and the process then leaves through _exit
// without letting its streams go on (what they would publish is not a sum).
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/collective/collective.h"

namespace slidedp::collective {

// 128 bytes that rank 0 makes, for one communicator, and the others are told.
absl::StatusOr<std::string> NewNcclUniqueId();

class NcclCollective : public Collective {
 public:
  // From any thread. Ok, or why this communicator is of no use any more: an
  // asynchronous NCCL error, or an operation that the GPU has begun and not
  // ended for `deadline_ns` (DeadlineExceeded names it).
  virtual absl::Status Check() = 0;
  // From any thread. Ends what the GPU runs of this communicator; whatever
  // comes after it in the streams then sees undefined data. All later
  // operations fail.
  virtual void Abort() = 0;
};

// Waits for all ranks to call it, DeadlineExceeded after `deadline_ns`, and
// runs each operation once, so that steps load no kernel and connect no
// channel.
absl::StatusOr<std::unique_ptr<NcclCollective>> NewNcclCollective(
    device::Device& device, absl::string_view unique_id, int rank,
    int world_size, int64_t deadline_ns);

}  // namespace slidedp::collective
