// The daemon's one loop: all job state is read and written by tasks of this
// loop, on one thread (hostd/daemon/README.md, the locking rule).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>

namespace slidedp::hostd {

class EventLoop {
 public:
  using Task = std::function<void()>;
  using TimerId = uint64_t;  // 0: none

  // Any thread. Tasks run in the order of their posting.
  void Post(Task task);
  // Any thread. Runs once, not before `delay_ns` from now.
  TimerId After(int64_t delay_ns, Task task);
  // Loop thread. A task that is cancelled here never runs.
  void Cancel(TimerId id);

  // Runs tasks until Stop(). What is posted before Stop() still runs; timers do
  // not.
  void Run();
  void Stop();

  // Instead of Run(), for tests: runs what is due now, and what that posts;
  // returns whether anything ran.
  bool RunReady();

 private:
  struct Timer {
    TimerId id;
    Task task;
  };
  // A timer that is due, else what was posted first, else null. Holds mutex_.
  Task TakeNext();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Task> ready_;                // guarded by mutex_
  std::multimap<int64_t, Timer> timers_;  // by MonotonicNs; guarded by mutex_
  TimerId next_timer_ = 1;                // guarded by mutex_
  bool stop_ = false;                     // guarded by mutex_
};

}  // namespace slidedp::hostd
