// How a thread polls a word that another thread, process or GPU will write: a
// few spins, then sleeps that grow, so that a waiting stream leaves the core
// to the one that it waits for.
#pragma once

#include <cstdint>

namespace slidedp {

// Lets this thread's short sleeps end on time (1 us of slack instead of the
// kernel's 50). Call once in a thread that polls.
void UseFineTimerSlack();

// One wait. Not shared between threads.
class Backoff {
 public:
  void Pause();

 private:
  static constexpr int kSpins = 64;
  static constexpr int64_t kFirstSleepNs = 5'000;
  static constexpr int64_t kLongestSleepNs = 100'000;

  int spins_ = 0;
  int64_t sleep_ns_ = kFirstSleepNs;
};

}  // namespace slidedp
