#include "hostd/daemon/event_loop.h"

#include <chrono>
#include <utility>

#include "common/base/clock.h"

namespace slidedp::hostd {

void EventLoop::Post(Task task) {
  std::lock_guard lock(mutex_);
  ready_.push_back(std::move(task));
  wake_.notify_one();
}

EventLoop::TimerId EventLoop::After(int64_t delay_ns, Task task) {
  std::lock_guard lock(mutex_);
  TimerId id = next_timer_++;
  timers_.emplace(MonotonicNs() + delay_ns, Timer{id, std::move(task)});
  wake_.notify_one();
  return id;
}

void EventLoop::Cancel(TimerId id) {
  if (id == 0) return;
  Task dropped;  // declared first: destroyed after the lock is released
  std::lock_guard lock(mutex_);
  for (auto it = timers_.begin(); it != timers_.end(); ++it) {
    if (it->second.id != id) continue;
    dropped = std::move(it->second.task);
    timers_.erase(it);
    return;
  }
}

EventLoop::Task EventLoop::TakeNext() {
  Task task;
  auto first = timers_.begin();
  if (first != timers_.end() && first->first <= MonotonicNs()) {
    task = std::move(first->second.task);
    timers_.erase(first);
  } else if (!ready_.empty()) {
    task = std::move(ready_.front());
    ready_.pop_front();
  }
  return task;
}

void EventLoop::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    if (Task task = TakeNext()) {
      lock.unlock();
      task();
      task = nullptr;
      lock.lock();
      continue;
    }
    if (stop_) return;
    if (timers_.empty()) {
      wake_.wait(lock);
    } else {
      wake_.wait_for(lock, std::chrono::nanoseconds(timers_.begin()->first -
                                                    MonotonicNs()));
    }
  }
}

void EventLoop::Stop() {
  std::lock_guard lock(mutex_);
  stop_ = true;
  wake_.notify_one();
}

bool EventLoop::RunReady() {
  bool ran = false;
  std::unique_lock lock(mutex_);
  while (Task task = TakeNext()) {
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
    ran = true;
  }
  return ran;
}

}  // namespace slidedp::hostd
