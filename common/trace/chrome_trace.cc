#include <algorithm>
#include <cstdlib>
#include <string>

#include "absl/strings/str_format.h"
#include "common/trace/trace.h"
#include "nlohmann/json.hpp"

namespace slidedp::trace {
namespace {

constexpr Lane kLanes[] = {Lane::kDeliver, Lane::kActivation, Lane::kCompute,
                           Lane::kReduce,  Lane::kDrain,      Lane::kUpdate,
                           Lane::kControl};

std::string Quoted(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', true,
                                   nlohmann::json::error_handler_t::replace);
}

// Exact: a double would round the nanoseconds of a host that is up for months.
std::string Micros(int64_t ns) {
  const uint64_t magnitude =
      ns < 0 ? -static_cast<uint64_t>(ns) : static_cast<uint64_t>(ns);
  return absl::StrFormat("%s%d.%03d", ns < 0 ? "-" : "", magnitude / 1000,
                         magnitude % 1000);
}

// Names a process, or one of its threads.
std::string NameEvent(const char* what, size_t pid, int tid,
                      const std::string& name) {
  return absl::StrFormat(
      R"({"ph":"M","name":"%s","pid":%d,"tid":%d,"args":{"name":%s}})", what,
      pid, tid, Quoted(name));
}

std::string SpanEvent(size_t pid, const Span& span) {
  std::string args = absl::StrFormat(R"("step":%d)", span.step);
  if (span.unit >= 0) args += absl::StrFormat(R"(,"unit":%d)", span.unit);
  if (span.chunk >= 0) args += absl::StrFormat(R"(,"chunk":%d)", span.chunk);
  const std::string lane(LaneName(span.lane).data(),
                         LaneName(span.lane).size());
  return absl::StrFormat(
      R"({"ph":"X","cat":%s,"name":%s,"pid":%d,"tid":%d,"ts":%s,"dur":%s,)"
      R"("args":{%s}})",
      Quoted(lane), Quoted(span.name == nullptr ? "" : span.name), pid,
      static_cast<int>(span.lane), Micros(span.begin_ns),
      Micros(std::max<int64_t>(span.end_ns - span.begin_ns, 0)), args);
}

}  // namespace

absl::string_view LaneName(Lane lane) {
  switch (lane) {
    case Lane::kDeliver:
      return "deliver";
    case Lane::kActivation:
      return "activation";
    case Lane::kCompute:
      return "compute";
    case Lane::kReduce:
      return "reduce";
    case Lane::kDrain:
      return "drain";
    case Lane::kUpdate:
      return "update";
    case Lane::kControl:
      return "control";
  }
  return "unknown";
}

void WriteChromeTrace(const std::vector<Process>& processes,
                      std::ostream& out) {
  out << "{\"traceEvents\": [";
  const char* separator = "\n";
  const auto write = [&](const std::string& event) {
    out << separator << event;
    separator = ",\n";
  };
  for (size_t pid = 0; pid < processes.size(); ++pid) {
    write(NameEvent("process_name", pid, 0, processes[pid].name));
    for (Lane lane : kLanes) {
      const absl::string_view name = LaneName(lane);
      write(NameEvent("thread_name", pid, static_cast<int>(lane),
                      std::string(name.data(), name.size())));
    }
    for (const Span& span : processes[pid].spans) {
      write(SpanEvent(pid, span));
    }
  }
  out << "\n]}\n";
}

}  // namespace slidedp::trace
