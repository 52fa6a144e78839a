// The spans of this rank's last steps, and of those that the daemon asks for.
// The trainer records every step (a few microseconds); sending happens only
// when a trace is wanted.
#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "common/trace/trace.h"
#include "proto/control.pb.h"

namespace slidedp::session {

// Thread-safe.
class StepTracer {
 public:
  StepTracer() : recorder_(kCapacity) {}

  // What the trainer records into: the spans of a step, then its "step".
  trace::Recorder& recorder() { return recorder_; }
  void Start(const v1::TraceSteps& steps);
  // The wanted steps that are over and have not been taken, in order. A step
  // that is not in the ring any more comes empty.
  std::vector<v1::WorkerMessage> Take();

 private:
  // Some hundred steps of a small model, a few of 100 layers; one of 80 layers
  // whose 128 micro-batches are all offloaded.
  static constexpr size_t kCapacity = size_t{1} << 16;

  trace::Recorder recorder_;
  std::mutex mutex_;
  // Guarded by mutex_: steps [next_, end_) are still wanted.
  uint64_t next_ = 0, end_ = 0;
};

}  // namespace slidedp::session
