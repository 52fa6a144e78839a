// A fixed pool that splits index ranges. Used by the CPU ops and nowhere on a
// per-chunk path of the daemon (hostd/update has its own placed workers).
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace slidedp {

// Thread-compatible: one caller at a time. With threads == 1 everything runs on
// the calling thread and no thread is started.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return threads_; }

  // Calls body(begin, end) over disjoint ranges that cover [0, n), each at
  // least `grain` long except the last; returns when all are done. The split
  // depends on n, grain and threads() only.
  void ParallelFor(size_t n, size_t grain,
                   const std::function<void(size_t, size_t)>& body);

 private:
  struct Shared;
  int threads_;
  std::unique_ptr<Shared> shared_;
};

}  // namespace slidedp
