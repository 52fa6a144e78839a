#include "common/shm/words.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "tests/testing/status_matchers.h"

namespace slidedp::shm {
namespace {

using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;

// Zeroed memory that starts on a cache line and ends where it should.
class Memory {
 public:
  explicit Memory(uint64_t bytes)
      : bytes_(bytes), data_(std::aligned_alloc(64, AlignUp(bytes, 64))) {
    std::memset(data_, 0, bytes);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { std::free(data_); }
  void* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  uint64_t OffsetOf(const void* address) const {
    return reinterpret_cast<uintptr_t>(address) -
           reinterpret_cast<uintptr_t>(data_);
  }

 private:
  uint64_t bytes_;
  void* data_;
};

WordsHeader Header(uint64_t world_size, uint64_t units) {
  WordsHeader header = {};
  header.world_size = world_size;
  header.units = units;
  header.buckets = 2 * units;
  header.state_layout_hash = 0x1111222233334444;
  header.plan_hash = 0x5555666677778888;
  return header;
}

constexpr std::pair<uint64_t, uint64_t> kShapes[] = {{1, 1}, {1, 30}, {2, 7},
                                                     {3, 8}, {5, 9},  {8, 98}};

TEST(WordsTest, EveryVersionsWordHasItsOwnCacheLine) {
  for (const auto& [ranks, units] : kShapes) {
    Memory memory(Versions::Bytes(ranks, units));
    const Versions versions =
        Versions::Initialise(memory.data(), Header(ranks, units));
    std::vector<uint64_t> offsets = {memory.OffsetOf(&versions.abort()),
                                     memory.OffsetOf(&versions.heartbeat())};
    for (uint64_t r = 0; r < ranks; ++r) {
      offsets.push_back(memory.OffsetOf(&versions.grad_free(r)));
    }
    for (uint64_t u = 0; u < units; ++u) {
      offsets.push_back(memory.OffsetOf(&versions.param_version(u)));
    }
    std::sort(offsets.begin(), offsets.end());
    for (size_t i = 0; i < offsets.size(); ++i) {
      // Dense after the header: line i + 1.
      ASSERT_EQ(offsets[i], 64 * (i + 1));
    }
    ASSERT_EQ(offsets.back() + 64, memory.bytes());
  }
}

TEST(WordsTest, WhatARankWritesSharesNoCacheLineWithAnother) {
  for (const auto& [ranks, units] : kShapes) {
    const uint64_t buckets = 2 * units, rows = 100 * units;
    Memory memory(Reports::Bytes(ranks, buckets, rows));
    WordsHeader header = Header(ranks, units);
    header.rows = rows;
    const Reports reports = Reports::Initialise(memory.data(), header);
    uint64_t end = sizeof(WordsHeader);
    for (uint64_t r = 0; r < ranks; ++r) {
      // In order, gapless but for padding, so nothing overlaps.
      const uint64_t heartbeat = memory.OffsetOf(&reports.heartbeat(r));
      ASSERT_EQ(heartbeat, end);
      ASSERT_EQ(memory.OffsetOf(&reports.grad_ready(r)), heartbeat + 64);
      for (uint64_t s = 0; s < kStepReportSlots; ++s) {
        ASSERT_EQ(memory.OffsetOf(&reports.step(r, s)),
                  heartbeat + 128 + s * sizeof(StepReport));
      }
      const uint64_t norms = memory.OffsetOf(&reports.square_norm(r, 0));
      ASSERT_EQ(norms, heartbeat + 128 + kStepReportSlots * sizeof(StepReport));
      ASSERT_EQ(memory.OffsetOf(&reports.square_norm(r, buckets - 1)),
                norms + 8 * (buckets - 1));
      const uint64_t used = memory.OffsetOf(reports.used_rows(r, 0));
      ASSERT_EQ(used, AlignUp(norms + 8 * buckets, 64));
      const uint64_t bytes = AlignUp(8 * RowWords(rows), 64);
      ASSERT_EQ(memory.OffsetOf(reports.used_rows(r, 7)), used + bytes);
      end = used + 2 * bytes;
    }
    ASSERT_EQ(end, memory.bytes());
  }
}

TEST(WordsTest, StepsUseTheSlotsInTurn) {
  Memory memory(Reports::Bytes(2, 3, 65));
  const Reports reports(memory.data(), 3, 65);
  EXPECT_EQ(reports.used_rows(1, 1), reports.used_rows(1, 5));
  EXPECT_NE(reports.used_rows(1, 1), reports.used_rows(1, 2));
  EXPECT_EQ(Reports(memory.data(), 3, 0).used_rows(1, 1), nullptr);
  EXPECT_NE(&reports.step(1, 0), &reports.step(1, 3));
  EXPECT_EQ(&reports.step(1, 2), &reports.step(1, 2 + 4 * 1000001));
  EXPECT_NE(&reports.step(0, 2), &reports.step(1, 2));
}

TEST(WordsTest, InitialiseWritesTheHeaderAndNothingElse) {
  Memory memory(Versions::Bytes(2, 3));
  Versions::Initialise(memory.data(), Header(2, 3));
  const auto* bytes = static_cast<const char*>(memory.data());
  EXPECT_TRUE(std::all_of(bytes + sizeof(WordsHeader), bytes + memory.bytes(),
                          [](char c) { return c == 0; }));
  uint64_t magic;
  std::memcpy(&magic, bytes, 8);
  EXPECT_EQ(magic, kVersionsMagic);
}

TEST(WordsTest, CheckNamesWhatDiffers) {
  Memory versions(Versions::Bytes(2, 3));
  Memory reports(Reports::Bytes(2, 6, 0));
  Versions::Initialise(versions.data(), Header(2, 3));
  Reports::Initialise(reports.data(), Header(2, 3));
  EXPECT_THAT(Versions::Check(versions.data(), versions.bytes(), Header(2, 3)),
              IsOk());
  EXPECT_THAT(Reports::Check(reports.data(), reports.bytes(), Header(2, 3)),
              IsOk());

  const auto check = [&](const WordsHeader& expected, const char* field) {
    for (const absl::Status& status :
         {Versions::Check(versions.data(), versions.bytes(), expected),
          Reports::Check(reports.data(), reports.bytes(), expected)}) {
      EXPECT_THAT(status, StatusIs(absl::StatusCode::kFailedPrecondition,
                                   HasSubstr(field)));
    }
  };
  check(Header(3, 3), "world_size");
  check(Header(2, 4), "units");
  WordsHeader other = Header(2, 3);
  other.rows = 1;
  check(other, "rows");
  other = Header(2, 3);
  other.buckets = 7;
  check(other, "buckets");
  other = Header(2, 3);
  other.state_layout_hash ^= 1;
  check(other, "state_layout_hash is 0x1111222233334444");
  other = Header(2, 3);
  other.plan_hash ^= 1;
  check(other, "plan_hash");
}

TEST(WordsTest, CheckRefusesTheOtherSegmentOtherVersionsAndOtherSizes) {
  Memory memory(Versions::Bytes(2, 3));
  const WordsHeader expected = Header(2, 3);
  EXPECT_THAT(
      Versions::Check(memory.data(), memory.bytes(), expected),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("magic")));
  Versions::Initialise(memory.data(), expected);
  EXPECT_THAT(
      Reports::Check(memory.data(), memory.bytes(), expected),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("magic")));
  for (uint64_t bytes :
       {uint64_t{0}, uint64_t{63}, memory.bytes() - 1, memory.bytes() + 1}) {
    EXPECT_THAT(
        Versions::Check(memory.data(), bytes, expected),
        StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("size")))
        << bytes;
  }
  static_cast<WordsHeader*>(memory.data())->layout_version++;
  EXPECT_THAT(Versions::Check(memory.data(), memory.bytes(), expected),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("layout_version")));
}

TEST(WordsTest, CheckRefusesImpossibleExpectationsAndAddresses) {
  Memory memory(Versions::Bytes(2, 3));
  for (const WordsHeader& expected :
       {Header(0, 1), Header(1, 0), Header(UINT64_MAX, 1),
        Header(1, UINT64_MAX)}) {
    EXPECT_THAT(Versions::Check(memory.data(), memory.bytes(), expected),
                StatusIs(absl::StatusCode::kInvalidArgument));
    EXPECT_THAT(Reports::Check(memory.data(), memory.bytes(), expected),
                StatusIs(absl::StatusCode::kInvalidArgument));
  }
  EXPECT_THAT(Versions::Check(static_cast<char*>(memory.data()) + 8,
                              memory.bytes() - 8, Header(2, 3)),
              StatusIs(absl::StatusCode::kInvalidArgument));
}

// A rank's host thread and its D2H stream on one side, the daemon on the other.
TEST(WordsTest, ReaderSeesNothingUntilPublish) {
  constexpr uint64_t kSteps = 500;
  Memory memory(Reports::Bytes(1, 4, 0));
  Memory acknowledgement(Versions::Bytes(1, 2));
  const Reports reports = Reports::Initialise(memory.data(), Header(1, 2));
  const Versions versions =
      Versions::Initialise(acknowledgement.data(), Header(1, 2));
  std::thread rank([&] {
    for (uint64_t t = 0; t < kSteps; ++t) {
      while (versions.param_version(0).load(std::memory_order_acquire) < t) {
        std::this_thread::yield();
      }
      StepReport& report = reports.step(0, t);
      report.valid_tokens = 3 * t;
      report.begin_ns = static_cast<int64_t>(5 * t);
      report.begun.value.store(t + 1, std::memory_order_release);
      report.loss_sum = 0.5 * static_cast<double>(t);
      report.loss_ready.value.store(t + 1, std::memory_order_release);
      reports.square_norm(0, 1) = 7.0 * static_cast<double>(t);
      reports.grad_ready(0).store(t + 1, std::memory_order_release);
    }
  });
  const auto wait = [](const std::atomic<uint64_t>& word, uint64_t value) {
    while (word.load(std::memory_order_acquire) < value) {
      std::this_thread::yield();
    }
  };
  for (uint64_t t = 0; t < kSteps; ++t) {
    const StepReport& report = reports.step(0, t);
    wait(report.begun.value, t + 1);
    ASSERT_EQ(report.valid_tokens, 3 * t);
    ASSERT_EQ(report.begin_ns, static_cast<int64_t>(5 * t));
    wait(report.loss_ready.value, t + 1);
    ASSERT_EQ(report.loss_sum, 0.5 * static_cast<double>(t));
    wait(reports.grad_ready(0), t + 1);
    ASSERT_EQ(reports.square_norm(0, 1), 7.0 * static_cast<double>(t));
    versions.param_version(0).store(t + 1, std::memory_order_release);
  }
  rank.join();
}

}  // namespace
}  // namespace slidedp::shm
