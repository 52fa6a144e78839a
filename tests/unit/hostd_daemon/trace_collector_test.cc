#include "hostd/daemon/trace_collector.h"

#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/spans.h"
#include "tests/testing/status_matchers.h"

namespace slidedp::hostd {
namespace {

using ::slidedp::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

trace::Span SpanOf(uint64_t step, int32_t unit, const char* name = "work") {
  return {trace::Lane::kUpdate, name, unit, 7, step, -5, 1'000'000'007};
}

v1::StepSpans Message(uint64_t step, const std::vector<trace::Span>& spans,
                      bool last_part = true) {
  v1::StepSpans message;
  message.set_step(step);
  *message.mutable_spans() = ToWire(spans).front();
  message.set_last_part(last_part);
  return message;
}

// "process:step" of every part.
std::vector<std::string> Parts(TraceCollector& collector) {
  std::vector<std::string> parts;
  v1::TraceReply reply;
  while (collector.Next(reply)) {
    parts.push_back(absl::StrCat(reply.process(), ":", reply.spans().step(0)));
  }
  return parts;
}

TEST(SpansTest, WireKeepsEveryField) {
  const std::vector<trace::Span> spans = {
      SpanOf(1, -1, "a"), SpanOf(uint64_t{1} << 40, 3, "b"), SpanOf(2, 4, "a")};
  const std::vector<v1::Spans> wire = ToWire(spans);
  ASSERT_EQ(wire.size(), 1u);
  EXPECT_EQ(wire[0].names_size(), 2);
  std::set<std::string> names;
  ASSERT_OK_AND_ASSIGN(std::vector<trace::Span> read, FromWire(wire[0], names));
  ASSERT_EQ(read.size(), spans.size());
  for (size_t i = 0; i < spans.size(); ++i) {
    EXPECT_EQ(read[i].lane, spans[i].lane);
    EXPECT_STREQ(read[i].name, spans[i].name);
    EXPECT_EQ(read[i].unit, spans[i].unit);
    EXPECT_EQ(read[i].chunk, spans[i].chunk);
    EXPECT_EQ(read[i].step, spans[i].step);
    EXPECT_EQ(read[i].begin_ns, spans[i].begin_ns);
    EXPECT_EQ(read[i].end_ns, spans[i].end_ns);
  }
}

TEST(SpansTest, ManySpansAreSeveralMessagesAndNoneIsOne) {
  const std::vector<trace::Span> spans(kMaxSpansPerMessage + 1, SpanOf(1, 1));
  const std::vector<v1::Spans> wire = ToWire(spans);
  ASSERT_EQ(wire.size(), 2u);
  EXPECT_EQ(wire[1].names(wire[1].name(0)), "work");
  EXPECT_EQ(ToWire({}).size(), 1u);
}

TEST(SpansTest, WhatNoSenderMakesIsRefused) {
  const v1::Spans good = ToWire({SpanOf(1, 1)}).front();
  std::vector<v1::Spans> bad(6, good);
  bad[0].clear_unit();
  bad[1].add_end_ns(1);
  bad[2].set_name(0, 1);
  bad[3].set_lane(0, 99);
  bad[4].set_names(0, std::string(1000, 'x'));
  for (int i = 0; i < 100; ++i) bad[5].add_names("name");
  std::set<std::string> names;
  EXPECT_OK(FromWire(good, names));
  for (const v1::Spans& wire : bad) {
    EXPECT_THAT(
        FromWire(wire, names),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("malformed")))
        << wire.ShortDebugString();
  }
}

TEST(TraceCollectorTest, CompleteWhenAllRanksAndTheUpdatesAreThere) {
  TraceCollector collector(5, 2, 2);
  EXPECT_EQ(collector.Request().trace_steps().first(), 5);
  EXPECT_EQ(collector.Request().trace_steps().count(), 2);
  int changes = 0;
  collector.on_change = [&] { ++changes; };
  trace::Recorder recorder(16);
  for (uint64_t step : {4, 5, 6, 7}) {
    recorder.Add(SpanOf(step, 0));
    collector.OnStep(step, 1, 2, recorder);
    collector.OnRank(0, Message(step, {SpanOf(step, 0)}));
    EXPECT_FALSE(collector.complete());
  }
  EXPECT_EQ(changes, 4);
  // Out of order, and one in two parts.
  collector.OnRank(1, Message(6, {SpanOf(6, 0)}));
  collector.OnRank(1, Message(5, {SpanOf(5, 0)}, /*last_part=*/false));
  EXPECT_FALSE(collector.complete());
  collector.OnRank(1, Message(5, {SpanOf(5, 1)}));
  EXPECT_TRUE(collector.complete());
  EXPECT_THAT(Parts(collector),
              ElementsAre("slidedpd:5", "rank 0:5", "slidedpd:6", "rank 0:6",
                          "rank 1:6", "rank 1:5", "rank 1:5"));
  EXPECT_OK(collector.failure());
}

TEST(TraceCollectorTest, AStepCountsOnce) {
  TraceCollector collector(0, 2, 1);
  trace::Recorder recorder(1);
  collector.OnStep(0, 1, 2, recorder);
  collector.OnStep(1, 1, 2, recorder);
  for (int i = 0; i < 3; ++i) {
    collector.OnRank(0, Message(0, {SpanOf(0, 0)}));
  }
  EXPECT_FALSE(collector.complete());
  EXPECT_EQ(Parts(collector).size(), 3u);
}

TEST(TraceCollectorTest, ARankThatMakesNoSenseFailsTheTrace) {
  TraceCollector collector(0, 1, 1);
  v1::StepSpans message = Message(0, {SpanOf(0, 0)});
  message.mutable_spans()->set_lane(0, 1000);
  collector.OnRank(0, message);
  EXPECT_TRUE(collector.complete());
  EXPECT_THAT(collector.failure(),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("rank 0")));
}

TEST(TraceCollectorTest, ARankCannotFillTheMemory) {
  TraceCollector collector(0, 1, 1);
  const v1::StepSpans message =
      Message(0, std::vector<trace::Span>(kMaxSpansPerMessage, SpanOf(0, 0)),
              /*last_part=*/false);
  for (int i = 0; i < 1000 && !collector.complete(); ++i) {
    collector.OnRank(0, message);
  }
  EXPECT_THAT(collector.failure(),
              StatusIs(absl::StatusCode::kResourceExhausted));
  v1::TraceReply reply;
  EXPECT_FALSE(collector.Next(reply));
}

}  // namespace
}  // namespace slidedp::hostd
