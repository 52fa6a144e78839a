// Busy time of the lanes of a step, from events recorded around their work.
// Reading them waits for nothing: a step is read once it is known to be over.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/device/device.h"
#include "common/trace/trace.h"

namespace slidedp::step {

// What a span is called in a trace: the name a literal, unit -1 for none.
struct Work {
  const char* name = "";
  int unit = -1;
};

enum class Lane {
  kDeliver,
  kCompute,
  kReduce,
  kDrain,
  kActivation,  // offload and reload
  // Backpressure: what a lane waits for, shown in its own row.
  kDeliverWait,     // a version, then a slot; between its spans
  kActivationWait,  // compute: a slot or a reload; within its spans
  kDrainWait,       // a chunk of the ring; within its spans
};
inline constexpr int kLanes = 8;

// Thread-compatible. Keeps the events of two steps.
class LaneTimes {
 public:
  // `spans`: the most spans that each lane has in one step.
  static absl::StatusOr<LaneTimes> Create(
      device::Device& device, const std::array<int64_t, kLanes>& spans);

  // Harvest also adds the step's spans to `recorder` (borrowed), then one of
  // lane kControl, "step", over all of them (but what deliveries wait for),
  // whose `chunk` is their number.
  void RecordInto(trace::Recorder* recorder) { recorder_ = recorder; }

  // Work between steps is not measured.
  void Pause(bool paused) { paused_ = paused; }

  // Around each piece of work, on the stream that does it.
  absl::Status Begin(Lane lane, uint64_t step, const Work& work,
                     device::Stream& stream);
  absl::Status End(Lane lane, uint64_t step, device::Stream& stream);

  struct Times {
    // Of compute and drain without the waits within.
    std::array<int64_t, kLanes> busy_ns{};
    int64_t stall_ns = 0;  // gaps between compute's spans, and those waits
    int64_t end_ns = 0;    // the last span's end
  };
  // Waits for the step's spans, sums them and forgets them.
  absl::StatusOr<Times> Harvest(uint64_t step);

 private:
  struct Span {
    Work work;
    std::unique_ptr<device::Event> begin, end;
  };
  struct LaneSpans {
    std::vector<Span> spans;
    size_t used = 0;
  };
  explicit LaneTimes(device::Device& device) : device_(&device) {}
  LaneSpans& lane(Lane lane, uint64_t step) {
    return lanes_[step % 2][static_cast<int>(lane)];
  }

  device::Device* device_;
  trace::Recorder* recorder_ = nullptr;
  bool paused_ = false;
  std::array<std::array<LaneSpans, kLanes>, 2> lanes_;
};

}  // namespace slidedp::step
