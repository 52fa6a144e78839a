#include "common/base/thread_pool.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace slidedp {
namespace {

using Range = std::pair<size_t, size_t>;

std::vector<Range> Ranges(ThreadPool& pool, size_t n, size_t grain) {
  std::mutex mutex;
  std::vector<Range> ranges;
  pool.ParallelFor(n, grain, [&](size_t begin, size_t end) {
    std::lock_guard<std::mutex> lock(mutex);
    ranges.emplace_back(begin, end);
  });
  std::sort(ranges.begin(), ranges.end());
  return ranges;
}

TEST(ThreadPoolTest, RangesCoverEverythingOnceAndRespectTheGrain) {
  for (int threads : {1, 2, 3, 7}) {
    ThreadPool pool(threads);
    for (size_t n : {0, 1, 2, 3, 63, 64, 65, 1000, 1001}) {
      for (size_t grain : {0, 1, 5, 64, 5000}) {
        const std::vector<Range> ranges = Ranges(pool, n, grain);
        size_t next = 0;
        for (const auto& [begin, end] : ranges) {
          ASSERT_EQ(begin, next);
          ASSERT_LT(begin, end);
          if (end != n) {
            ASSERT_GE(end - begin, grain);
          }
          next = end;
        }
        ASSERT_EQ(next, n) << threads << " threads, grain " << grain;
        ASSERT_LE(ranges.size(), static_cast<size_t>(threads));
      }
    }
  }
}

TEST(ThreadPoolTest, TheSplitIsAlwaysTheSame) {
  ThreadPool pool(3), other(3);
  const auto first = Ranges(pool, 1000, 7);
  for (int i = 0; i < 20; ++i) ASSERT_EQ(Ranges(pool, 1000, 7), first);
  EXPECT_EQ(Ranges(other, 1000, 7), first);
}

TEST(ThreadPoolTest, WorkOfAllThreadsIsVisibleToTheCaller) {
  ThreadPool pool(4);
  std::vector<int> values(10007);
  for (int round = 1; round <= 200; ++round) {
    pool.ParallelFor(values.size(), 16, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) values[i] += round;
    });
  }
  for (int value : values) ASSERT_EQ(value, 200 * 201 / 2);
}

TEST(ThreadPoolTest, OneThreadIsTheCaller) {
  ThreadPool pool(1);
  std::thread::id seen;
  pool.ParallelFor(100, 1,
                   [&](size_t, size_t) { seen = std::this_thread::get_id(); });
  EXPECT_EQ(seen, std::this_thread::get_id());
}

TEST(ThreadPoolTest, RangesReallyRunAtTheSameTime) {
  ThreadPool pool(3);
  // Each part waits for the others; a pool that runs them in turn never ends.
  std::mutex mutex;
  std::condition_variable all_here;
  int here = 0;
  pool.ParallelFor(3, 1, [&](size_t, size_t) {
    std::unique_lock<std::mutex> lock(mutex);
    ++here;
    all_here.notify_all();
    all_here.wait(lock, [&] { return here == 3; });
  });
  EXPECT_EQ(here, 3);
}

TEST(ThreadPoolTest, AnUnusedPoolEnds) {
  for (int i = 0; i < 50; ++i) ThreadPool pool(4);
}

TEST(ThreadPoolDeathTest, NeedsAThread) {
  EXPECT_DEATH(ThreadPool(0), "at least one thread");
}

}  // namespace
}  // namespace slidedp
