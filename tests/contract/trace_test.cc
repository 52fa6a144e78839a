#include "common/trace/trace.h"

#include <atomic>
#include <cstdint>
#include <map>
#include <sstream>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace slidedp::trace {
namespace {

Span Numbered(uint64_t n, const char* name = "chunk") {
  const auto i = static_cast<int64_t>(n);
  return {Lane::kDrain,
          name,
          static_cast<int32_t>(n % 97),
          static_cast<int32_t>(n % 89),
          n,
          i * 3,
          i * 3 + 1};
}

void ExpectConsistent(const Span& span) {
  const Span want = Numbered(span.step);
  ASSERT_EQ(span.lane, want.lane);
  ASSERT_STREQ(span.name, want.name);
  ASSERT_EQ(span.unit, want.unit);
  ASSERT_EQ(span.chunk, want.chunk);
  ASSERT_EQ(span.begin_ns, want.begin_ns);
  ASSERT_EQ(span.end_ns, want.end_ns);
}

TEST(RecorderTest, KeepsTheLastSpansOldestFirst) {
  Recorder recorder(8);
  EXPECT_TRUE(recorder.Snapshot().empty());
  for (uint64_t n = 0; n < 5; ++n) recorder.Add(Numbered(n));
  ASSERT_EQ(recorder.Snapshot().size(), 5u);
  for (uint64_t n = 5; n < 21; ++n) recorder.Add(Numbered(n));
  const std::vector<Span> spans = recorder.Snapshot();
  ASSERT_EQ(spans.size(), 8u);
  for (size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(spans[i].step, 13 + i);
    ExpectConsistent(spans[i]);
  }
}

TEST(RecorderTest, KeepsEveryFieldAtItsExtremes) {
  Recorder recorder(1);
  const Span span = {Lane::kControl, "x",       -1,       INT32_MAX,
                     UINT64_MAX,     INT64_MIN, INT64_MAX};
  recorder.Add(span);
  const Span got = recorder.Snapshot().at(0);
  EXPECT_EQ(got.unit, -1);
  EXPECT_EQ(got.chunk, INT32_MAX);
  EXPECT_EQ(got.step, UINT64_MAX);
  EXPECT_EQ(got.begin_ns, INT64_MIN);
  EXPECT_EQ(got.end_ns, INT64_MAX);
  EXPECT_EQ(got.lane, Lane::kControl);
}

TEST(RecorderTest, SnapshotsUnderFireHoldWholeSpansOnly) {
  Recorder recorder(16);
  std::atomic<uint64_t> next{0};
  std::atomic<bool> stop{false};
  std::thread writers[3];
  for (std::thread& writer : writers) {
    writer = std::thread([&] {
      while (!stop.load()) recorder.Add(Numbered(next.fetch_add(1)));
    });
  }
  size_t seen = 0;
  for (int i = 0; i < 2000 || seen == 0; ++i) {
    const std::vector<Span> spans = recorder.Snapshot();
    ASSERT_LE(spans.size(), 16u);
    seen += spans.size();
    for (const Span& span : spans) ExpectConsistent(span);
  }
  stop.store(true);
  for (std::thread& writer : writers) writer.join();
}

TEST(RecorderDeathTest, CapacityIsAPowerOfTwo) {
  EXPECT_DEATH(Recorder(0), "power of two");
  EXPECT_DEATH(Recorder(12), "power of two");
}

nlohmann::json Written(const std::vector<Process>& processes) {
  std::ostringstream out;
  WriteChromeTrace(processes, out);
  return nlohmann::json::parse(out.str()).at("traceEvents");
}

TEST(ChromeTraceTest, NamesProcessesAndLanes) {
  const nlohmann::json events = Written({{"rank 0", {}}, {"slidedpd", {}}});
  EXPECT_EQ(events.size(), 2u * (1 + 7));
  EXPECT_EQ(events[0]["name"], "process_name");
  EXPECT_EQ(events[0]["args"]["name"], "rank 0");
  EXPECT_EQ(events[8]["pid"], 1);
  EXPECT_EQ(events[8]["args"]["name"], "slidedpd");
  EXPECT_EQ(events[9]["args"]["name"], "deliver");
}

TEST(ChromeTraceTest, SpansAreCompleteEventsInMicroseconds) {
  const Span span = {Lane::kCompute, "forward",    3, -1, 12,
                     1'234'567'891,  1'234'570'000};
  const nlohmann::json event = Written({{"rank 0", {span}}}).back();
  EXPECT_EQ(event["ph"], "X");
  EXPECT_EQ(event["name"], "forward");
  EXPECT_EQ(event["cat"], "compute");
  EXPECT_DOUBLE_EQ(event["ts"], 1'234'567.891);
  EXPECT_DOUBLE_EQ(event["dur"], 2.109);
  EXPECT_EQ(event["args"]["step"], 12);
  EXPECT_EQ(event["args"]["unit"], 3);
  EXPECT_FALSE(event["args"].contains("chunk"));
}

TEST(ChromeTraceTest, SpansThatOverlapHaveThreadsOfTheirOwn) {
  const auto span = [](Lane lane, int64_t begin_ns, int64_t end_ns) {
    return Span{lane, "work", -1, -1, 0, begin_ns, end_ns};
  };
  const nlohmann::json events =
      Written({{"slidedpd",
                {span(Lane::kUpdate, 0, 10), span(Lane::kUpdate, 9, 20),
                 span(Lane::kUpdate, 10, 30), span(Lane::kDrain, 5, 15)}}});
  std::vector<int> threads;
  std::map<int, std::string> names;
  for (const nlohmann::json& event : events) {
    if (event["ph"] == "X") threads.push_back(event["tid"]);
    if (event["name"] == "thread_name") {
      names[event["tid"]] = event["args"]["name"];
    }
  }
  ASSERT_EQ(threads.size(), 4u);
  EXPECT_NE(threads[0], threads[1]);
  EXPECT_EQ(threads[0], threads[2]);
  EXPECT_EQ(names[threads[0]], "update");
  EXPECT_EQ(names[threads[1]], "update 2");
  EXPECT_EQ(names[threads[3]], "drain");
}

TEST(ChromeTraceTest, OddNamesAndTimesStayValidJson) {
  const Span hostile = {Lane::kUpdate, "a\"b\\\n\xff", -1, -1, 0, -1500, -2000};
  const nlohmann::json events = Written({{"r\"0\x01\xc3", {hostile}}});
  EXPECT_DOUBLE_EQ(events.back()["ts"], -1.5);
  EXPECT_DOUBLE_EQ(events.back()["dur"], 0);
  EXPECT_EQ(Written({}).size(), 0u);
}

TEST(LaneNameTest, LanesHaveDifferentNames) {
  EXPECT_EQ(LaneName(Lane::kDeliver), "deliver");
  EXPECT_EQ(LaneName(Lane::kUpdate), "update");
  EXPECT_EQ(LaneName(static_cast<Lane>(200)), "unknown");
}

}  // namespace
}  // namespace slidedp::trace
