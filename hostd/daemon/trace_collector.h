// A trace of a job's next steps: the ranks' spans, as they send them, and those
// of the update workers, until a client has taken them.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/trace/trace.h"
#include "proto/control.pb.h"

namespace slidedp::hostd {

inline constexpr uint32_t kMaxTracedSteps = 1000;

// Loop thread only. The client holds it; the run only knows it while it lives.
class TraceCollector {
 public:
  // Steps [first, first + count), counted from 0, of `ranks` ranks.
  TraceCollector(uint64_t first, uint64_t count, uint32_t ranks);

  // For every rank.
  v1::DaemonMessage Request() const;
  // Of a rank that is not trusted. What was not asked for is dropped; what
  // makes no sense, or is more than any trace, fails the trace.
  void OnRank(uint32_t rank, const v1::StepSpans& message);
  // A step is applied: its spans are in `recorder`.
  void OnStep(uint64_t step, int64_t begin_ns, int64_t end_ns,
              const trace::Recorder& recorder);

  // The next part for the client; false: none now.
  bool Next(v1::TraceReply& reply);
  // Everything is here, or `failure` is set.
  bool complete() const;
  const absl::Status& failure() const { return failure_; }
  // Called after each of the above that changed something.
  std::function<void()> on_change;

 private:
  bool Wanted(uint64_t step) const {
    return step >= first_ && step < first_ + count_;
  }
  void Add(const std::string& process, v1::Spans spans);

  const uint64_t first_, count_;
  // Of each rank, and last of the update workers: steps that are complete.
  std::vector<std::set<uint64_t>> done_;
  uint64_t spans_ = 0;
  std::deque<v1::TraceReply> parts_;
  absl::Status failure_;
};

}  // namespace slidedp::hostd
