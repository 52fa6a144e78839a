// A checkpoint's files into a job's planes. The files are the user's: hostile.
#pragma once

#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/fd.h"
#include "common/checkpoint/manifest.h"
#include "hostd/store/host_state.h"

namespace slidedp::hostd {

// Of a job that wants to go on from the checkpoint.
struct ResumeJob {
  checkpoint::Identity sampler;
  uint64_t steps = 0;
};

// Reads manifest.json and the weights and state that it names into the planes,
// all by `files`, the checkpoint's names and descriptors, and checks sizes,
// checksums, and that what enters the planes can have been there. An error
// names the file; the planes then hold some of it. No worker may use them yet.
absl::StatusOr<checkpoint::Manifest> LoadCheckpoint(
    std::vector<std::pair<std::string, UniqueFd>> files, const ResumeJob& job,
    HostState& state, const std::atomic<bool>* stop = nullptr,
    LoadProgress* progress = nullptr);

}  // namespace slidedp::hostd
