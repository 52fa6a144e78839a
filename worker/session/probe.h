// slidedp-worker --probe: the GPUs that a worker started this way would see,
// for slidedpd and slidedpctl, which link no CUDA.
#pragma once

#include <string>

namespace slidedp::session {

// One line of JSON:
//   {"cuda": true, "problem": "", "gpus": [{"name": "NVIDIA H200 (sm_90)",
//    "uuid": "GPU-...", "memory_bytes": 150000000000}]}
// `cuda`: this build has it. `problem`: why the driver does not work.
std::string ProbeLine();

}  // namespace slidedp::session
