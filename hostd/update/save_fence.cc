#include "hostd/update/save_fence.h"

#include <algorithm>
#include <utility>

namespace slidedp::hostd {

SaveFence::SaveFence(size_t units, Push push)
    : push_(std::move(push)), held_(units), waiting_(units) {}

void SaveFence::Hold() {
  std::lock_guard lock(mutex_);
  std::fill(held_.begin(), held_.end(), 1);
}

void SaveFence::Release(int unit) {
  std::lock_guard lock(mutex_);
  held_[unit] = 0;
  for (const Task& task : std::exchange(waiting_[unit], {})) push_(task);
}

void SaveFence::Pass(const Task& task) {
  std::lock_guard lock(mutex_);
  if (held_[task.unit]) {
    waiting_[task.unit].push_back(task);
  } else {
    push_(task);
  }
}

void SaveFence::Drop(absl::FunctionRef<void()> drain) {
  std::lock_guard lock(mutex_);
  for (std::vector<Task>& tasks : waiting_) tasks.clear();
  drain();
}

}  // namespace slidedp::hostd
