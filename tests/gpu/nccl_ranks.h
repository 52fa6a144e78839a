// Ranks that meet through NCCL: one forked process and one GPU each. The parent
// must not have used CUDA.
#pragma once

#include <vector>

#include "tests/contract/collective_ranks.h"

namespace slidedp::collective {

// Counted in a child. 0: none, or no driver.
int CountGpus();

std::vector<absl::Status> RunOverNccl(const RankSetup& setup,
                                      const RankBody& body);
// Through a PeerCollective; GPUs that don't reach each other are an error.
std::vector<absl::Status> RunOverPeers(const RankSetup& setup,
                                       const RankBody& body);

}  // namespace slidedp::collective
