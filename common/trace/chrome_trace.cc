#include <algorithm>
#include <map>
#include <numeric>
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

// A viewer nests spans of one thread; so each lane has as many threads as it
// ever has spans at once. Lane l's row r is thread l * kRows + r.
constexpr int kRows = 1000;

int Tid(Lane lane, int row) { return static_cast<int>(lane) * kRows + row; }

// The row of each span; the fewest that keep spans of a row apart.
std::vector<int> Rows(const std::vector<Span>& spans) {
  std::vector<size_t> order(spans.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return spans[a].begin_ns < spans[b].begin_ns;
  });
  std::map<Lane, std::vector<int64_t>> ends;  // per row
  std::vector<int> rows(spans.size());
  for (size_t i : order) {
    std::vector<int64_t>& lane = ends[spans[i].lane];
    auto row = std::find_if(lane.begin(), lane.end(), [&](int64_t end_ns) {
      return end_ns <= spans[i].begin_ns;
    });
    if (row == lane.end() && lane.size() < size_t{kRows}) {
      row = lane.insert(row, spans[i].begin_ns);
    }
    if (row == lane.end()) --row;  // more at once than anyone can look at
    *row = std::max(*row, spans[i].end_ns);
    rows[i] = static_cast<int>(row - lane.begin());
  }
  return rows;
}

// Names a process, or one of its threads.
std::string NameEvent(const char* what, size_t pid, int tid,
                      const std::string& name) {
  return absl::StrFormat(
      R"({"ph":"M","name":"%s","pid":%d,"tid":%d,"args":{"name":%s}})", what,
      pid, tid, Quoted(name));
}

std::string SpanEvent(size_t pid, int tid, const Span& span) {
  std::string args = absl::StrFormat(R"("step":%d)", span.step);
  if (span.unit >= 0) args += absl::StrFormat(R"(,"unit":%d)", span.unit);
  if (span.chunk >= 0) args += absl::StrFormat(R"(,"chunk":%d)", span.chunk);
  const std::string lane(LaneName(span.lane).data(),
                         LaneName(span.lane).size());
  return absl::StrFormat(
      R"({"ph":"X","cat":%s,"name":%s,"pid":%d,"tid":%d,"ts":%s,"dur":%s,)"
      R"("args":{%s}})",
      Quoted(lane), Quoted(span.name == nullptr ? "" : span.name), pid, tid,
      Micros(span.begin_ns),
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
    const std::vector<Span>& spans = processes[pid].spans;
    const std::vector<int> rows = Rows(spans);
    for (Lane lane : kLanes) {
      const absl::string_view name = LaneName(lane);
      int most = 0;
      for (size_t i = 0; i < spans.size(); ++i) {
        if (spans[i].lane == lane) most = std::max(most, rows[i]);
      }
      for (int row = 0; row <= most; ++row) {
        write(NameEvent("thread_name", pid, Tid(lane, row),
                        row == 0 ? std::string(name.data(), name.size())
                                 : absl::StrFormat("%s %d", name, row + 1)));
      }
    }
    for (size_t i = 0; i < spans.size(); ++i) {
      write(SpanEvent(pid, Tid(spans[i].lane, rows[i]), spans[i]));
    }
  }
  out << "\n]}\n";
}

}  // namespace slidedp::trace
