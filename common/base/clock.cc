#include "common/base/clock.h"

#include <time.h>

namespace slidedp {
namespace {

int64_t Nanoseconds(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

int64_t MonotonicNs() { return Nanoseconds(CLOCK_MONOTONIC); }
int64_t UnixMicros() { return Nanoseconds(CLOCK_REALTIME) / 1000; }

}  // namespace slidedp
