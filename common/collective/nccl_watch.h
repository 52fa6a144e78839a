// The operations of a communicator that the GPU has not ended yet. Private to
// this folder.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <deque>
#include <vector>

#include "absl/status/status.h"
#include "common/collective/operation.h"

namespace slidedp::collective {

// Thread-compatible. The current device must be the stream's own.
class NcclWatch {
 public:
  explicit NcclWatch(int64_t deadline_ns) : deadline_ns_(deadline_ns) {}
  ~NcclWatch();

  absl::Status Create();
  // Around an operation's launch, both or neither if the launch fails.
  absl::Status Begin(const Operation& operation, cudaStream_t stream);
  absl::Status End(cudaStream_t stream);
  // DeadlineExceeded: an operation has run for longer than the deadline.
  absl::Status Check();

 private:
  struct Launch {
    Operation operation;
    uint64_t number;
    cudaEvent_t begun, ended;
    int64_t begun_ns = 0;  // when first seen to have begun
  };

  absl::Status Retire();

  const int64_t deadline_ns_;
  std::vector<std::array<cudaEvent_t, 2>> spare_;
  std::deque<Launch> running_;
  // Between Begin and End: whether the operation is watched.
  bool watched_ = false;
  uint64_t operations_ = 0;
};

}  // namespace slidedp::collective
