// The operations of a collective that the GPU has not ended yet. Private to
// this folder.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "absl/status/status.h"
#include "common/collective/operation.h"

namespace slidedp::collective {

// Begin and End from one thread at a time, Check from any and without waiting
// for them: they may block in a full stream. The current device must be the
// stream's own.
class OperationWatch {
 public:
  explicit OperationWatch(int64_t deadline_ns) : deadline_ns_(deadline_ns) {}
  ~OperationWatch();

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
    bool launched = false;  // `ended` is in the stream
    int64_t begun_ns = 0;   // when first seen to have begun
  };

  absl::Status RetireLocked();

  const int64_t deadline_ns_;
  // Of Begin and End.
  bool watched_ = false;  // between them: whether the operation is
  uint64_t operations_ = 0;

  std::mutex mutex_;  // guards what follows; not held in calls that may block
  std::vector<std::array<cudaEvent_t, 2>> spare_;
  std::deque<Launch> running_;
};

}  // namespace slidedp::collective
