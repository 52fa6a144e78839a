#include "worker/session/process_stats.h"

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>
#include <thread>

namespace slidedp::session {

uint64_t PssBytes() {
  std::ifstream rollup("/proc/self/smaps_rollup");
  std::string line;
  while (std::getline(rollup, line)) {
    unsigned long long kib = 0;
    if (std::sscanf(line.c_str(), "Pss: %llu kB", &kib) == 1) {
      return uint64_t{kib} * 1024;
    }
  }
  return 0;
}

uint32_t AllowedCpus() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    return static_cast<uint32_t>(CPU_COUNT(&set));
  }
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace slidedp::session
