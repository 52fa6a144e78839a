// Runs one function as every rank of a collective, with each way that this
// build has of making ranks meet.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/collective/collective.h"
#include "common/device/device.h"

namespace slidedp::collective {

struct RankContext {
  Collective& collective;
  device::Device& device;
  device::Stream& stream;
};
using RankBody = std::function<absl::Status(RankContext&)>;

struct RankSetup {
  int world_size = 1;
  size_t staging_bytes = 4096;
  int64_t deadline_ns = 60'000'000'000;
};

struct CollectiveBackend {
  std::string name;
  // Returns the status of each rank.
  std::function<std::vector<absl::Status>(const RankSetup&, const RankBody&)>
      run;
  bool staged = true;  // goes through staging buffers
};

// Threads of this process that share one region.
std::vector<absl::Status> RunAsThreads(const RankSetup& setup,
                                       const RankBody& body);
// Forked processes that map one exchange segment.
std::vector<absl::Status> RunAsProcesses(const RankSetup& setup,
                                         const RankBody& body);
// The collective of one rank; `setup.world_size` must be 1.
std::vector<absl::Status> RunSolo(const RankSetup& setup, const RankBody& body);

}  // namespace slidedp::collective
