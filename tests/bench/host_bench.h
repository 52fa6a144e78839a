// The figures of slidedp-bench-host.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "tests/bench/host_unit.h"
#include "worker/bench/machine.h"
#include "worker/bench/record.h"

namespace slidedp::bench {

struct HostOptions {
  UnitOptions unit;
  int contending_threads = 1;  // of the update beside deliveries
  uint64_t chunk_bytes = uint64_t{16} << 20;
  int gpus = 1;  // deliveries at once, one each; the CPU device: 1
  int repeats = 5;
  MachineOptions machine;
  Origin origin;
};

// [delivery-800m], [delivery-800m-contended]: copies of the unit's BF16 plane
// from the registered segment, against copies from pinned memory, and with an
// update of the same unit running.
absl::Status BenchDelivery(const HostOptions& options, HostUnit& unit);

}  // namespace slidedp::bench
