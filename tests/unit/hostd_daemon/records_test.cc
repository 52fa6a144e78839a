#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "hostd/daemon/event_loop.h"
#include "hostd/daemon/log_lines.h"
#include "hostd/daemon/step_records.h"
#include "tests/testing/status_matchers.h"
#include "tests/testing/temp_folder.h"

namespace slidedp::hostd {
namespace {

using ::slidedp::testing::StatusIs;
using ::slidedp::testing::TempFolder;
using ::testing::ElementsAre;

v1::StepRecord StepOf(uint64_t step) {
  v1::StepRecord record;
  record.set_step(step);
  record.set_loss(1.0 / static_cast<double>(step));
  record.set_lr(1e-5);
  record.set_valid_tokens(100);
  record.set_tokens(128);
  record.set_update_ns(-1);
  return record;
}

v1::Record Record(uint64_t step) {
  v1::Record record;
  *record.mutable_step() = StepOf(step);
  return record;
}

v1::Record Evaluation(uint64_t step) {
  v1::Record record;
  record.mutable_eval()->set_step(step);
  record.mutable_eval()->set_loss(0.5);
  record.mutable_eval()->set_valid_tokens(77);
  record.mutable_eval()->set_sequences(3);
  record.mutable_eval()->set_best(true);
  return record;
}

std::vector<uint64_t> Steps(const std::vector<v1::Record>& records) {
  std::vector<uint64_t> steps;
  for (const v1::Record& record : records) {
    steps.push_back(record.step().step());
  }
  return steps;
}

// All that a reader gets, in batches of `most`.
std::vector<uint64_t> ReadAll(const StepRecords& records, uint64_t after,
                              size_t most) {
  StepRecords::Cursor cursor = StepRecords::Cursor::AfterStep(after);
  std::vector<uint64_t> all;
  while (true) {
    std::vector<uint64_t> steps = Steps(records.Next(cursor, most));
    if (steps.empty()) return all;
    EXPECT_LE(steps.size(), most);
    all.insert(all.end(), steps.begin(), steps.end());
  }
}

// "e2": the evaluation after step 2.
std::vector<std::string> Places(const StepRecords& from, uint64_t after = 0) {
  StepRecords::Cursor cursor = StepRecords::Cursor::AfterStep(after);
  std::vector<std::string> all;
  for (;;) {
    const std::vector<v1::Record> next = from.Next(cursor, 2);
    if (next.empty()) return all;
    for (const v1::Record& record : next) {
      all.push_back(record.has_eval()
                        ? "e" + std::to_string(record.eval().step())
                        : std::to_string(record.step().step()));
    }
  }
}

// Notes what is synced.
class NotedSyncs : public DiskCalls {
 public:
  absl::Status Sync(int fd, const std::string& path) override {
    paths.push_back(path);
    return DiskCalls::Sync(fd, path);
  }
  std::vector<std::string> paths;
};

TEST(StepRecordsTest, SyncingSyncsTheFileAndItsName) {
  TempFolder folder;
  NotedSyncs calls;
  EXPECT_OK(StepRecords::Sync(folder.path(), calls));
  EXPECT_THAT(calls.paths, ::testing::IsEmpty());  // no record yet
  StepRecords records(folder.path());
  ASSERT_OK(records.Append(Record(1)));
  EXPECT_OK(StepRecords::Sync(folder.path(), calls));
  EXPECT_THAT(calls.paths,
              ElementsAre(folder.Sub("metrics.jsonl"), folder.path()));
}

TEST(StepRecordsTest, LineSurvivesTheRoundTrip) {
  v1::StepRecord record = StepOf(3);
  record.set_loss(std::nextafter(2.5, 3.0));
  record.set_grad_norm(std::numeric_limits<double>::infinity());
  record.set_skipped(true);
  record.set_skip_reason("loss is \"NaN\"\n");
  std::string line = ToJsonLine(record);
  EXPECT_EQ(line.find('\n'), std::string::npos);
  ASSERT_OK_AND_ASSIGN(const v1::Record read, FromJsonLine(line));
  const v1::StepRecord& back = read.step();
  EXPECT_EQ(back.loss(), record.loss());
  EXPECT_TRUE(std::isnan(back.grad_norm()));
  EXPECT_EQ(back.skip_reason(), record.skip_reason());
  EXPECT_EQ(back.update_ns(), -1);
  for (const char* bad :
       {"", "{}", "[]", "{\"step\":-1}", "{\"step\":1", "x"}) {
    EXPECT_FALSE(FromJsonLine(bad).ok()) << bad;
  }
}

TEST(StepRecordsTest, ReaderGetsEveryRecordOnceFromMemoryAndFile) {
  TempFolder folder;
  StepRecords records(folder.path());
  const uint64_t count = StepRecords::kInMemory + 1000;
  for (uint64_t step = 1; step <= count; ++step) {
    ASSERT_OK(records.Append(Record(step)));
  }
  for (uint64_t after : {uint64_t{0}, uint64_t{777}, count - 3, count}) {
    std::vector<uint64_t> steps = ReadAll(records, after, 97);
    ASSERT_EQ(steps.size(), count - after);
    for (uint64_t i = 0; i < steps.size(); ++i) {
      ASSERT_EQ(steps[i], after + 1 + i);
    }
  }
  records.Forget();
  EXPECT_EQ(ReadAll(records, 0, 500).size(), count);
  EXPECT_EQ(records.Last()->step(), count);
  // A later daemon.
  StepRecords again(folder.path());
  EXPECT_EQ(ReadAll(again, count - 2, 5),
            (std::vector<uint64_t>{count - 1, count}));
}

TEST(StepRecordsTest, EvaluationLineSurvivesTheRoundTrip) {
  const v1::Record record = Evaluation(40);
  ASSERT_OK_AND_ASSIGN(const v1::Record read,
                       FromJsonLine(ToJsonLine(record.eval())));
  EXPECT_EQ(read.SerializeAsString(), record.SerializeAsString());
  EXPECT_FALSE(FromJsonLine("{\"eval_step\":1}").ok());
}

// After a step comes its evaluation; before the first step there may be one.
TEST(StepRecordsTest, EvaluationsComeAfterTheirStepFromMemoryAndFile) {
  TempFolder folder;
  StepRecords records(folder.path());
  for (const v1::Record& record :
       {Evaluation(0), Record(1), Record(2), Evaluation(2), Record(3)}) {
    ASSERT_OK(records.Append(record));
  }
  const StepRecords again(folder.path());
  for (const StepRecords* from : {&std::as_const(records), &again}) {
    EXPECT_THAT(Places(*from), ElementsAre("e0", "1", "2", "e2", "3"));
    EXPECT_THAT(Places(*from, 1), ElementsAre("2", "e2", "3"));
    EXPECT_THAT(Places(*from, 2), ElementsAre("e2", "3"));
    EXPECT_THAT(Places(*from, 3), ElementsAre());
    EXPECT_EQ(from->Last()->step(), 3);
  }
}

TEST(StepRecordsTest, ReaderWaitsAtTheEnd) {
  TempFolder folder;
  StepRecords records(folder.path());
  StepRecords::Cursor cursor;
  EXPECT_TRUE(records.Next(cursor, 10).empty());
  ASSERT_OK(records.Append(Record(1)));
  EXPECT_THAT(Steps(records.Next(cursor, 10)), ElementsAre(1));
  EXPECT_TRUE(records.Next(cursor, 10).empty());
  ASSERT_OK(records.Append(Record(2)));
  EXPECT_THAT(Steps(records.Next(cursor, 10)), ElementsAre(2));
}

TEST(StepRecordsTest, DamagedLinesArePassedOver) {
  TempFolder folder;
  folder.Write("metrics.jsonl", ToJsonLine(StepOf(1)) + "\nnonsense\n" +
                                    "{\"step\":2,\"loss\":}\n" +
                                    ToJsonLine(StepOf(3)) + "\n" +
                                    ToJsonLine(StepOf(4)).substr(0, 40));
  StepRecords records(folder.path());
  EXPECT_THAT(ReadAll(records, 0, 10), ElementsAre(1, 3));
  EXPECT_EQ(records.Last()->step(), 3);
}

TEST(StepRecordsTest, TruncatedRecordsAreMadeAnew) {
  TempFolder folder;
  const uint64_t count = StepRecords::kInMemory + 100;
  for (uint64_t keep :
       {uint64_t{0}, uint64_t{1}, uint64_t{50}, count - 1, count, count + 7}) {
    std::filesystem::remove(folder.Sub("metrics.jsonl"));
    StepRecords records(folder.path());
    EXPECT_OK(records.Truncate(keep));  // nothing is there yet
    for (uint64_t step = 1; step <= count; ++step) {
      ASSERT_OK(records.Append(Record(step)));
    }
    // One has read all, one a part.
    StepRecords::Cursor behind;
    EXPECT_THAT(Steps(records.Next(behind, 1)), ElementsAre(1));
    ASSERT_OK(records.Truncate(keep));
    const uint64_t left = std::min(keep, count);
    EXPECT_EQ(ReadAll(records, 0, 1000).size(), left);
    for (uint64_t step = left + 1; step <= left + 3; ++step) {
      ASSERT_OK(records.Append(Record(step)));
    }
    EXPECT_EQ(ReadAll(records, 0, 1000).size(), left + 3);
    EXPECT_EQ(records.Last()->step(), left + 3);
    StepRecords later(folder.path());
    EXPECT_EQ(ReadAll(later, 0, 1000).size(), left + 3);
    uint64_t expected = 2;
    while (true) {
      const std::vector<uint64_t> steps = Steps(records.Next(behind, 1000));
      if (steps.empty()) break;
      for (uint64_t step : steps) EXPECT_EQ(step, expected++);
    }
    EXPECT_EQ(expected, left + 4);
  }
}

TEST(StepRecordsTest, AnEvaluationOfTheLastStepIsMadeAnew) {
  TempFolder folder;
  StepRecords records(folder.path());
  for (const v1::Record& record :
       {Evaluation(0), Record(1), Record(2), Evaluation(2), Record(3)}) {
    ASSERT_OK(records.Append(record));
  }
  ASSERT_OK(records.Truncate(2));
  EXPECT_THAT(Places(records), ElementsAre("e0", "1", "2"));
  ASSERT_OK(records.Append(Evaluation(2)));
  EXPECT_THAT(Places(records), ElementsAre("e0", "1", "2", "e2"));
  EXPECT_THAT(Places(StepRecords(folder.path())),
              ElementsAre("e0", "1", "2", "e2"));
}

TEST(StepRecordsTest, TruncationLeavesDamagedLinesAndDropsHalfOfOne) {
  TempFolder folder;
  const std::string good =
      ToJsonLine(StepOf(1)) + "\nnonsense\n" + ToJsonLine(StepOf(3)) + "\n";
  folder.Write("metrics.jsonl", good + ToJsonLine(StepOf(4)).substr(0, 40));
  StepRecords records(folder.path());
  ASSERT_OK(records.Truncate(9));
  EXPECT_EQ(testing::ReadWhole(folder.Sub("metrics.jsonl")), good);
  ASSERT_OK(records.Truncate(2));
  EXPECT_THAT(ReadAll(records, 0, 10), ElementsAre(1));
}

TEST(StepRecordsTest, ErrorIsToldOnceAndMemoryGoesOn) {
  TempFolder folder;
  StepRecords records(folder.Sub("missing"));
  EXPECT_FALSE(records.Append(Record(1)).ok());
  EXPECT_OK(records.Append(Record(2)));
  EXPECT_THAT(ReadAll(records, 0, 10), ElementsAre(1, 2));
  EXPECT_THAT(StepRecords(folder.Sub("missing")).Last(),
              StatusIs(absl::StatusCode::kNotFound));
}

TEST(LogLinesTest, LinesComeWhenTheyAreComplete) {
  TempFolder folder;
  const std::string path = folder.Write("log", "one\ntw");
  LogLines lines(path);
  lines.SeekTail(0);
  EXPECT_THAT(lines.Next(false), ElementsAre("one"));
  EXPECT_THAT(lines.Next(false), ElementsAre());
  std::ofstream(path, std::ios::app) << "o\r\n\nthree";
  EXPECT_THAT(lines.Next(false), ElementsAre("two", ""));
  EXPECT_THAT(lines.Next(true), ElementsAre("three"));
  EXPECT_THAT(lines.Next(true), ElementsAre());
}

TEST(LogLinesTest, TailCountsLines) {
  TempFolder folder;
  std::string text;
  for (int i = 0; i < 30000; ++i) text += "line " + std::to_string(i) + "\n";
  const std::string whole = folder.Write("whole", text);
  const std::string open = folder.Write("open", text + "end");
  auto tail = [](const std::string& path, uint64_t count) {
    LogLines lines(path);
    lines.SeekTail(count);
    std::vector<std::string> all;
    while (true) {
      std::vector<std::string> some = lines.Next(true);
      if (some.empty()) return all;
      all.insert(all.end(), some.begin(), some.end());
    }
  };
  EXPECT_THAT(tail(whole, 2), ElementsAre("line 29998", "line 29999"));
  EXPECT_THAT(tail(open, 2), ElementsAre("line 29999", "end"));
  EXPECT_EQ(tail(whole, 20000).size(), 20000);
  EXPECT_EQ(tail(whole, 20000).front(), "line 10000");
  EXPECT_EQ(tail(whole, 40000).size(), 30000);
  EXPECT_EQ(tail(whole, 0).size(), 30000);
  EXPECT_TRUE(tail(folder.Sub("missing"), 3).empty());
  EXPECT_TRUE(tail(folder.Write("empty", ""), 3).empty());
}

TEST(LogLinesTest, HostileBytesBecomeText) {
  EXPECT_EQ(ToValidUtf8("caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"),
            "caf\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80");
  const std::string bad = "\xEF\xBF\xBD";
  EXPECT_EQ(ToValidUtf8("\xff"), bad);
  EXPECT_EQ(ToValidUtf8("\xc3"), bad);
  EXPECT_EQ(ToValidUtf8("\xc0\xaf"), bad + bad);
  EXPECT_EQ(ToValidUtf8("\xed\xa0\x80"), bad + bad + bad);
  EXPECT_EQ(ToValidUtf8("\xf5\x80\x80\x80"), bad + bad + bad + bad);
  EXPECT_EQ(ToValidUtf8(std::string("\0\x07\t\n", 4)), bad + bad + "\t\n");
  TempFolder folder;
  LogLines lines(folder.Write("log", std::string(100000, 'x') + "\nend\n"));
  size_t bytes = 0;
  std::string last;
  while (true) {
    std::vector<std::string> some = lines.Next(true);
    if (some.empty()) break;
    for (const std::string& line : some) {
      EXPECT_LE(line.size(), 32768);
      bytes += line.size();
      last = line;
    }
  }
  EXPECT_EQ(bytes, 100003);
  EXPECT_EQ(last, "end");
}

TEST(LogLinesTest, LastLineSaysSomething) {
  TempFolder folder;
  EXPECT_EQ(LastLine(folder.Write("a", "first\nlast words\n\n  \n")),
            "last words");
  EXPECT_EQ(LastLine(folder.Write("b", "")), "");
  EXPECT_EQ(LastLine(folder.Sub("missing")), "");
  EXPECT_EQ(LastLine(folder.Write("c", std::string(9000, 'y'))).size(), 200);
}

TEST(EventLoopTest, RunsInTheOrderOfPosting) {
  EventLoop loop;
  std::vector<int> order;
  loop.Post([&] {
    order.push_back(1);
    loop.Post([&] { order.push_back(3); });
  });
  loop.Post([&] { order.push_back(2); });
  EXPECT_TRUE(loop.RunReady());
  EXPECT_THAT(order, ElementsAre(1, 2, 3));
  EXPECT_FALSE(loop.RunReady());
}

TEST(EventLoopTest, CancelledTimerNeverRunsEvenIfItIsDue) {
  EventLoop loop;
  bool ran = false;
  EventLoop::TimerId due = 0;
  // Both are due at once; the first cancels the second.
  loop.After(0, [&] { loop.Cancel(due); });
  due = loop.After(0, [&] { ran = true; });
  loop.RunReady();
  EXPECT_FALSE(ran);
  loop.Cancel(0);
  loop.Cancel(12345);
}

TEST(EventLoopTest, StopRunsWhatWasPostedBefore) {
  EventLoop loop;
  int ran = 0;
  loop.After(3'600'000'000'000, [&] { ran += 100; });
  loop.Post([&] { ++ran; });
  loop.Post([&] {
    ++ran;
    loop.Stop();
    loop.Post([&] { ++ran; });
  });
  loop.Run();
  EXPECT_EQ(ran, 3);
}

}  // namespace
}  // namespace slidedp::hostd
