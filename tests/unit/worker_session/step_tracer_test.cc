#include "worker/session/step_tracer.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace slidedp::session {
namespace {

using ::testing::ElementsAre;

v1::TraceSteps Steps(uint64_t first, uint64_t count) {
  v1::TraceSteps steps;
  steps.set_first(first);
  steps.set_count(count);
  return steps;
}

// As LaneTimes does: the lanes' spans, then the step that counts them.
void Record(StepTracer& tracer, uint64_t step, int spans) {
  for (int i = 0; i < spans; ++i) {
    tracer.recorder().Add(
        {trace::Lane::kCompute, "forward", i, -1, step, 10, 20});
  }
  tracer.recorder().Add(
      {trace::Lane::kControl, "step", -1, spans, step, 10, 20});
}

// Number of spans of each step taken.
std::vector<int> Take(StepTracer& tracer, uint64_t first) {
  std::vector<int> counts;
  for (const v1::WorkerMessage& message : tracer.Take()) {
    EXPECT_EQ(message.step_spans().step(), first++);
    EXPECT_TRUE(message.step_spans().last_part());
    counts.push_back(message.step_spans().spans().name_size());
  }
  return counts;
}

TEST(StepTracerTest, NothingIsSentUnasked) {
  StepTracer tracer;
  Record(tracer, 0, 3);
  EXPECT_TRUE(tracer.Take().empty());
}

TEST(StepTracerTest, StepsAreTakenOnceWhenTheyAreOver) {
  StepTracer tracer;
  Record(tracer, 0, 3);
  Record(tracer, 1, 4);
  tracer.Start(Steps(1, 2));
  EXPECT_THAT(Take(tracer, 1), ElementsAre(5));
  EXPECT_TRUE(tracer.Take().empty());
  tracer.recorder().Add({trace::Lane::kCompute, "forward", 0, -1, 2, 10, 20});
  EXPECT_TRUE(tracer.Take().empty());
  tracer.recorder().Add({trace::Lane::kControl, "step", -1, 1, 2, 10, 20});
  Record(tracer, 3, 6);
  EXPECT_THAT(Take(tracer, 2), ElementsAre(2));
  EXPECT_TRUE(tracer.Take().empty());
}

TEST(StepTracerTest, AStepThatTheRingHasLostComesEmpty) {
  StepTracer tracer;
  tracer.Start(Steps(0, 8));
  // More than fits: of step 1 a part is left.
  for (uint64_t step = 0; step < 8; ++step) Record(tracer, step, 10'000);
  EXPECT_THAT(Take(tracer, 0), ElementsAre(0, 0, 10'001, 10'001, 10'001, 10'001,
                                           10'001, 10'001));
}

TEST(StepTracerTest, TheCountOfAStepIsNotAChunk) {
  StepTracer tracer;
  tracer.Start(Steps(0, 1));
  Record(tracer, 0, 2);
  const std::vector<v1::WorkerMessage> messages = tracer.Take();
  ASSERT_EQ(messages.size(), 1u);
  EXPECT_THAT(messages[0].step_spans().spans().chunk(),
              ElementsAre(-1, -1, -1));
}

}  // namespace
}  // namespace slidedp::session
