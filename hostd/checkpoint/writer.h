// A job's state into the files of a checkpoint, straight from the planes: no
// copy of the state, and a bounded part of the page cache.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/disk_calls.h"
#include "common/checkpoint/files.h"
#include "common/model/source.h"
#include "hostd/store/host_state.h"

namespace slidedp::hostd {

struct WriteOptions {
  int threads = 1;
  // Which unit is wanted first; every unit once.
  std::vector<int> unit_order;
  // The unit's planes may change from here on. Called once for each, from any
  // of the threads.
  std::function<void(int unit)> unit_saved;
  const std::atomic<bool>* stop = nullptr;
  std::atomic<uint64_t>* written_bytes = nullptr;  // counts up
  DiskCalls* calls = &RealDiskCalls();
};

// In which order units are updated next: the embedding first, part of which is
// updated early, then as the update mode goes through the others.
std::vector<int> SaveOrder(const model::StateLayout& layout,
                           policy::UpdateMode mode);

// Fills `fds`, empty files of full size in the order of `files`; a unit's
// planes don't change before `unit_saved`. Nothing is synced. Returns the
// files' checksums. After an error the files are of no use, and some units were
// not told of.
absl::StatusOr<std::vector<uint32_t>> WriteCheckpoint(
    const std::vector<checkpoint::File>& files,
    const model::TensorSource& source, const HostState& state,
    const std::vector<int>& fds, const WriteOptions& options);

}  // namespace slidedp::hostd
