#include "worker/step/lane_times.h"

#include <algorithm>
#include <limits>

#include "common/base/check.h"
#include "common/base/status.h"

namespace slidedp::step {
namespace {

trace::Lane TraceLane(int lane) {
  switch (static_cast<Lane>(lane)) {
    case Lane::kDeliver:
    case Lane::kDeliverWait:
      return trace::Lane::kDeliver;
    case Lane::kCompute:
    case Lane::kActivationWait:
      return trace::Lane::kCompute;
    case Lane::kReduce:
      return trace::Lane::kReduce;
    case Lane::kDrain:
    case Lane::kDrainWait:
      return trace::Lane::kDrain;
    case Lane::kActivation:
      return trace::Lane::kActivation;
  }
  SDP_CHECK(false, "lane");
}

}  // namespace

absl::StatusOr<LaneTimes> LaneTimes::Create(
    device::Device& device, const std::array<int64_t, kLanes>& spans) {
  LaneTimes times(device);
  for (auto& step : times.lanes_) {
    for (int lane = 0; lane < kLanes; ++lane) {
      step[lane].spans.resize(spans[lane]);
      for (Span& span : step[lane].spans) {
        SDP_ASSIGN_OR_RETURN(span.begin, device.NewEvent());
        SDP_ASSIGN_OR_RETURN(span.end, device.NewEvent());
      }
    }
  }
  return times;
}

absl::Status LaneTimes::Begin(Lane lane_name, uint64_t step, const Work& work,
                              device::Stream& stream) {
  if (paused_) return absl::OkStatus();
  LaneSpans& spans = lane(lane_name, step);
  SDP_CHECK(spans.used < spans.spans.size(), "more spans than planned");
  spans.spans[spans.used].work = work;
  return device_->Record(*spans.spans[spans.used].begin, stream);
}

absl::Status LaneTimes::End(Lane lane_name, uint64_t step,
                            device::Stream& stream) {
  if (paused_) return absl::OkStatus();
  LaneSpans& spans = lane(lane_name, step);
  return device_->Record(*spans.spans[spans.used++].end, stream);
}

absl::StatusOr<LaneTimes::Times> LaneTimes::Harvest(uint64_t step) {
  Times times;
  int64_t begin_ns = std::numeric_limits<int64_t>::max();
  int32_t count = 0;
  for (int l = 0; l < kLanes; ++l) {
    LaneSpans& spans = lanes_[step % 2][l];
    int64_t previous_end = 0;
    for (size_t i = 0; i < spans.used; ++i) {
      SDP_RETURN_IF_ERROR(device_->Synchronize(*spans.spans[i].end));
      SDP_ASSIGN_OR_RETURN(const int64_t begin,
                           device_->TimestampNs(*spans.spans[i].begin));
      SDP_ASSIGN_OR_RETURN(const int64_t end,
                           device_->TimestampNs(*spans.spans[i].end));
      times.busy_ns[l] += end - begin;
      // The wait for a version begins in the step before.
      if (l != static_cast<int>(Lane::kDeliverWait)) {
        begin_ns = std::min(begin_ns, begin);
      }
      ++count;
      if (recorder_ != nullptr) {
        const Work& work = spans.spans[i].work;
        recorder_->Add(
            {TraceLane(l), work.name, work.unit, -1, step, begin, end});
      }
      if (l == static_cast<int>(Lane::kCompute) && i > 0) {
        times.stall_ns += begin - previous_end;
      }
      previous_end = end;
      times.end_ns = std::max(times.end_ns, end);
    }
    spans.used = 0;
  }
  const int64_t waits = times.busy_ns[static_cast<int>(Lane::kActivationWait)];
  times.busy_ns[static_cast<int>(Lane::kCompute)] -= waits;
  times.stall_ns += waits;
  times.busy_ns[static_cast<int>(Lane::kDrain)] -=
      times.busy_ns[static_cast<int>(Lane::kDrainWait)];
  if (recorder_ != nullptr && count > 0) {
    recorder_->Add({trace::Lane::kControl, "step", -1, count, step, begin_ns,
                    times.end_ns});
  }
  return times;
}

}  // namespace slidedp::step
