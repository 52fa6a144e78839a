#include "hostd/update/save_fence.h"

#include <algorithm>
#include <utility>

namespace slidedp::hostd {

SaveFence::SaveFence(std::vector<char> changes, Push push)
    : changes_(std::move(changes)),
      push_(std::move(push)),
      held_(changes_.size()),
      waiting_(changes_.size()) {}

void SaveFence::Hold() {
  std::lock_guard lock(mutex_);
  held_ = changes_;
}

bool SaveFence::holds_any() const {
  std::lock_guard lock(mutex_);
  return std::find(held_.begin(), held_.end(), 1) != held_.end();
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
