// How much host memory this process may still take.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace slidedp {

struct MemoryRoom {
  uint64_t bytes;
  // What sets it: "MemAvailable of the host", "memory.max of cgroup /a/b".
  std::string limit;
};

// The smallest of MemAvailable and what each memory cgroup (v1 or v2) of this
// process leaves, with reclaimable page cache counted as free and swap not
// counted. `root` is a prefix of every path read, "" in production.
absl::StatusOr<MemoryRoom> AvailableMemory(const std::string& root = "");

// Proportional set size of this process, from /proc/self/smaps_rollup: shared
// pages count once over all of their users. 0 if the kernel does not say. Walks
// every page table: a second and more for 100 GiB.
uint64_t ProcessPssBytes();

// What an idle host would leave: the smallest of MemTotal and the limits of the
// same cgroups.
absl::StatusOr<MemoryRoom> MemoryCapacity(const std::string& root = "");

}  // namespace slidedp
