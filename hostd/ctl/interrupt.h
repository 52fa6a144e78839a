// Ctrl-C for streaming calls: main's signal thread raises it, the call under
// way is cancelled. Thread-safe.
#pragma once

#include <functional>
#include <mutex>
#include <utility>

namespace slidedp::ctl {

class Interrupt {
 public:
  void Raise() {
    std::lock_guard<std::mutex> lock(mutex_);
    raised_ = true;
    if (on_raise_) on_raise_();
  }
  bool raised() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return raised_;
  }
  // Whether a call is under way that Raise ends, or somebody looks at raised()
  // and cleans up; otherwise Ctrl-C should end the process.
  bool armed() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return on_raise_ != nullptr || held_;
  }
  void Hold(bool held) {
    std::lock_guard<std::mutex> lock(mutex_);
    held_ = held;
  }
  // `on_raise` runs on the raising thread, at once if already raised. Null
  // disarms; no call to the former one is running when it returns.
  void Arm(std::function<void()> on_raise) {
    std::lock_guard<std::mutex> lock(mutex_);
    on_raise_ = std::move(on_raise);
    if (raised_ && on_raise_) on_raise_();
  }

 private:
  mutable std::mutex mutex_;
  bool raised_ = false;
  bool held_ = false;
  std::function<void()> on_raise_;
};

}  // namespace slidedp::ctl
