// Holds back the tasks that would change a unit's planes before the unit has
// been saved. Units are held together, between two steps, and released one by
// one, by whoever saves them.
#pragma once

#include <functional>
#include <mutex>
#include <vector>

#include "absl/functional/function_ref.h"
#include "hostd/update/node_pools.h"

namespace slidedp::hostd {

// Thread-safe. Calls `push` and `drain` under its mutex: a task that was held
// can't come after a drain that should have dropped it.
class SaveFence {
 public:
  using Push = std::function<void(const Task& task)>;
  // `changes`, per unit: whether it ever does. One that does not is never held.
  SaveFence(std::vector<char> changes, Push push);

  void Hold();  // no task that writes planes runs or is queued
  bool holds_any() const;
  void Release(int unit);  // again: no effect
  // At once, or when the task's unit is released.
  void Pass(const Task& task);
  // What waits is dropped; `drain` drops what was pushed.
  void Drop(absl::FunctionRef<void()> drain);

 private:
  const std::vector<char> changes_;
  const Push push_;
  mutable std::mutex mutex_;
  // Per unit, guarded by mutex_.
  std::vector<char> held_;
  std::vector<std::vector<Task>> waiting_;
};

}  // namespace slidedp::hostd
