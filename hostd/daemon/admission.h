// What a job takes of the host, and whether that is there. Arithmetic only.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/model/config.h"
#include "common/model/layout.h"
#include "policy/plan.h"

namespace slidedp::hostd {

struct Demand {
  std::vector<policy::NamedBytes> segments;  // policy::HostSegments
  // Of one rank, in host memory: all of a CPU rank's device, the pinned buffers
  // of a GPU rank.
  std::vector<policy::NamedBytes> device;
  int ranks = 0;

  uint64_t segment_bytes() const;
  uint64_t device_bytes() const;  // all ranks
  uint64_t total_bytes() const { return segment_bytes() + device_bytes(); }
};
Demand MakeDemand(const model::ModelConfig& config,
                  const model::StateLayout& layout, const policy::Plan& plan);

// The host as this process may use it.
struct HostMemory {
  uint64_t total_bytes = 0;
  std::string total_limit;  // what sets it
  uint64_t available_bytes = 0;
  std::string available_limit;
};

struct MemoryLimits {
  uint64_t max_host_bytes = 0;  // of all jobs; 0: no limit
  uint64_t headroom_bytes = 0;
};

// Bytes that running jobs have been promised.
struct Promised {
  uint64_t all_bytes = 0;      // of all running jobs
  uint64_t pending_bytes = 0;  // the part not yet taken of the host
};

// ResourceExhausted, with the table, for a job that an idle host can't hold.
absl::Status FitsEver(const Demand& demand, const HostMemory& host,
                      const MemoryLimits& limits);
// "waiting for memory: needs X, Y free"; none if it fits beside what is
// promised.
std::optional<std::string> WhyNotNow(const Demand& demand,
                                     const HostMemory& host,
                                     const MemoryLimits& limits,
                                     const Promised& promised);

// One line a row: segments, device buffers, sums.
std::string DemandTable(const Demand& demand);

}  // namespace slidedp::hostd
