#include "common/base/backoff.h"

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>

namespace slidedp {

void UseFineTimerSlack() { prctl(PR_SET_TIMERSLACK, 1000UL); }

void Backoff::Pause() {
  if (spins_ < kSpins) {
    ++spins_;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
    return;
  }
  const timespec sleep = {0, sleep_ns_};
  nanosleep(&sleep, nullptr);  // a signal only makes it shorter
  sleep_ns_ = std::min(sleep_ns_ * 2, kLongestSleepNs);
}

}  // namespace slidedp
