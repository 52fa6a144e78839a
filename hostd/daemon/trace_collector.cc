#include "hostd/daemon/trace_collector.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/spans.h"

namespace slidedp::hostd {
namespace {

// 100 bytes each at most while a slow client keeps them here.
constexpr uint64_t kMaxSpans = 4'000'000;

}  // namespace

TraceCollector::TraceCollector(uint64_t first, uint64_t count, uint32_t ranks)
    : first_(first), count_(count), done_(ranks + 1) {}

v1::DaemonMessage TraceCollector::Request() const {
  v1::DaemonMessage message;
  message.mutable_trace_steps()->set_first(first_);
  message.mutable_trace_steps()->set_count(count_);
  return message;
}

void TraceCollector::OnRank(uint32_t rank, const v1::StepSpans& message) {
  if (!failure_.ok() || !Wanted(message.step()) ||
      done_[rank].contains(message.step())) {
    return;
  }
  std::set<std::string> names;
  const absl::StatusOr<std::vector<trace::Span>> spans =
      FromWire(message.spans(), names);
  if (!spans.ok()) {
    failure_ = absl::InternalError(
        absl::StrCat("rank ", rank, ": ", spans.status().message()));
  } else {
    if (message.last_part()) done_[rank].insert(message.step());
    Add(absl::StrCat("rank ", rank), message.spans());
  }
  if (on_change) on_change();
}

void TraceCollector::OnStep(uint64_t step, int64_t begin_ns, int64_t end_ns,
                            const trace::Recorder& recorder) {
  if (!failure_.ok() || !Wanted(step)) return;
  std::vector<trace::Span> spans;
  for (const trace::Span& span : recorder.Snapshot()) {
    if (span.step == step) spans.push_back(span);
  }
  spans.push_back(
      {trace::Lane::kControl, "step", -1, -1, step, begin_ns, end_ns});
  for (v1::Spans& part : ToWire(spans)) Add("slidedpd", std::move(part));
  done_.back().insert(step);
  if (on_change) on_change();
}

void TraceCollector::Add(const std::string& process, v1::Spans spans) {
  spans_ += spans.name_size();
  if (spans_ > kMaxSpans) {
    failure_ = absl::ResourceExhaustedError(absl::StrCat(
        "the trace has more than ", kMaxSpans, " spans; trace fewer steps"));
    parts_.clear();
    return;
  }
  v1::TraceReply& part = parts_.emplace_back();
  part.set_process(process);
  *part.mutable_spans() = std::move(spans);
  part.set_first_step(first_ + 1);
  part.set_last_step(first_ + count_);
}

bool TraceCollector::Next(v1::TraceReply& reply) {
  if (parts_.empty()) return false;
  reply = std::move(parts_.front());
  parts_.pop_front();
  return true;
}

bool TraceCollector::complete() const {
  if (!failure_.ok()) return true;
  for (const std::set<uint64_t>& done : done_) {
    if (done.size() < count_) return false;
  }
  return true;
}

}  // namespace slidedp::hostd
