// Makes a job's step records: what the engine says of a step, and how fast that
// was. Thread-compatible.
#pragma once

#include <cstdint>

#include "hostd/update/engine.h"
#include "proto/job.pb.h"

namespace slidedp::hostd {

class StepMeasures {
 public:
  struct Job {
    uint64_t tokens = 0;  // of a step, padding included
    // Model FLOPs of a step, and what its GPUs can do in a second; 0: not
    // known, there is no MFU.
    double flops = 0;
    double peak_flops_per_second = 0;
  };
  explicit StepMeasures(const Job& job) : job_(job) {}

  // In the order of steps. Memory and spikes are not its business.
  v1::StepRecord Next(const StepResult& result);
  // Something else was done since the last step's end: the next one's time is
  // its own, not the distance to the last.
  void Interrupted() { last_end_ns_ = 0; }

 private:
  const Job job_;
  int64_t last_end_ns_ = 0;
};

}  // namespace slidedp::hostd
