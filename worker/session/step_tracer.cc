#include "worker/session/step_tracer.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "proto/spans.h"

namespace slidedp::session {
namespace {

// Whether all spans of a step are there: its last, "step", counts the others
// in `chunk`, which then means nothing any more.
bool TakeWhole(std::vector<trace::Span>& spans) {
  if (spans.empty() || spans.back().lane != trace::Lane::kControl) return false;
  const int32_t count = std::exchange(spans.back().chunk, -1);
  return spans.size() == static_cast<size_t>(count) + 1;
}

}  // namespace

void StepTracer::Start(const v1::TraceSteps& steps) {
  std::lock_guard<std::mutex> lock(mutex_);
  next_ = steps.first();
  end_ = steps.count() > std::numeric_limits<uint64_t>::max() - next_
             ? std::numeric_limits<uint64_t>::max()
             : next_ + steps.count();
}

std::vector<v1::WorkerMessage> StepTracer::Take() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<v1::WorkerMessage> messages;
  if (next_ >= end_) return messages;
  std::map<uint64_t, std::vector<trace::Span>> steps;
  uint64_t over = 0;  // steps known to be over
  for (const trace::Span& span : recorder_.Snapshot()) {
    if (span.lane == trace::Lane::kControl) {
      over = std::max(over, span.step + 1);
    }
    if (span.step >= next_ && span.step < end_) {
      steps[span.step].push_back(span);
    }
  }
  for (; next_ < std::min(over, end_); ++next_) {
    std::vector<trace::Span>& spans = steps[next_];
    // Half a step would look like a step with idle lanes.
    if (!TakeWhole(spans)) spans.clear();
    std::vector<v1::Spans> parts = ToWire(spans);
    for (size_t i = 0; i < parts.size(); ++i) {
      v1::StepSpans& message = *messages.emplace_back().mutable_step_spans();
      message.set_step(next_);
      *message.mutable_spans() = std::move(parts[i]);
      message.set_last_part(i + 1 == parts.size());
    }
  }
  return messages;
}

}  // namespace slidedp::session
