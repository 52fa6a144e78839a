#include "worker/session/process_stats.h"

#include <sched.h>

#include <algorithm>
#include <thread>

namespace slidedp::session {

uint32_t AllowedCpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    return static_cast<uint32_t>(CPU_COUNT(&set));
  }
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace slidedp::session
