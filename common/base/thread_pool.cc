#include "common/base/thread_pool.h"

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "common/base/check.h"
#include "common/base/units.h"

namespace slidedp {

struct ThreadPool::Shared {
  std::mutex mutex;
  std::condition_variable start;
  std::condition_variable done;
  // All below under `mutex`. A new generation is a new ParallelFor.
  uint64_t generation = 0;
  bool stop = false;
  size_t n = 0;
  size_t range = 0;    // length of each part but the last
  size_t pending = 0;  // parts that threads have not finished
  const std::function<void(size_t, size_t)>* body = nullptr;
  std::vector<std::thread> threads;  // thread i takes part i; the caller part 0

  void Run(size_t part) {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      start.wait(lock, [&] { return stop || generation != seen; });
      if (stop) return;
      seen = generation;
      const size_t begin = part * range;
      if (begin >= n) continue;
      const size_t end = std::min(n, begin + range);
      const auto* call = body;
      lock.unlock();
      (*call)(begin, end);
      lock.lock();
      if (--pending == 0) done.notify_one();
    }
  }
};

ThreadPool::ThreadPool(int threads) : threads_(threads) {
  SDP_CHECK(threads >= 1, "a thread pool needs at least one thread");
  if (threads == 1) return;
  shared_ = std::make_unique<Shared>();
  for (int part = 1; part < threads; ++part) {
    shared_->threads.emplace_back(
        [shared = shared_.get(), part] { shared->Run(part); });
  }
}

ThreadPool::~ThreadPool() {
  if (shared_ == nullptr) return;
  {
    std::lock_guard<std::mutex> lock(shared_->mutex);
    shared_->stop = true;
  }
  shared_->start.notify_all();
  for (std::thread& thread : shared_->threads) thread.join();
}

void ThreadPool::ParallelFor(size_t n, size_t grain,
                             const std::function<void(size_t, size_t)>& body) {
  if (n == 0) return;
  grain = std::clamp<size_t>(grain, 1, n);
  // A multiple of `grain`, so that every part but the last is long enough.
  const size_t range = AlignUp(CeilDiv(n, threads_), grain);
  if (threads_ == 1 || range >= n) {
    body(0, n);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(shared_->mutex);
    shared_->n = n;
    shared_->range = range;
    shared_->pending = CeilDiv(n, range) - 1;
    shared_->body = &body;
    ++shared_->generation;
  }
  shared_->start.notify_all();
  body(0, range);
  std::unique_lock<std::mutex> lock(shared_->mutex);
  shared_->done.wait(lock, [&] { return shared_->pending == 0; });
}

}  // namespace slidedp
