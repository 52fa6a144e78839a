// Spans of the lanes of a step, kept in a bounded ring per process and written
// as Chrome trace JSON. One clock: MonotonicNs. Thread-safe; recording takes no
// lock and allocates nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace slidedp::trace {

enum class Lane : uint8_t {
  kDeliver,
  kActivation,
  kCompute,
  kReduce,
  kDrain,
  kUpdate,
  kControl,
};
absl::string_view LaneName(Lane lane);

struct Span {
  Lane lane;
  // A string literal: "forward", "backward", "chunk"...
  const char* name;
  int32_t unit;  // -1: none
  int32_t chunk;
  uint64_t step;
  int64_t begin_ns, end_ns;
};

// The last `capacity` spans (a power of two).
class Recorder {
 public:
  explicit Recorder(size_t capacity);
  ~Recorder();
  void Add(const Span& span);
  // Oldest first. Spans being overwritten at that moment are left out.
  std::vector<Span> Snapshot() const;

 private:
  struct Ring;
  std::unique_ptr<Ring> ring_;
};

struct Process {
  std::string name;  // "rank 0", "slidedpd"
  std::vector<Span> spans;
};
// {"traceEvents": [...]}: complete events in microseconds, one tid per lane.
void WriteChromeTrace(const std::vector<Process>& processes, std::ostream& out);

}  // namespace slidedp::trace
