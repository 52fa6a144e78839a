// The GPUs of this host, told by `slidedp-worker --probe`: neither slidedpd nor
// slidedpctl links CUDA.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace slidedp::hostd {

struct Gpu {
  std::string name;  // "NVIDIA H200 (sm_90)"
  std::string uuid;  // as CUDA_VISIBLE_DEVICES takes it
  uint64_t memory_bytes = 0;
};

struct GpuFacts {
  bool built = false;     // slidedp-worker has CUDA
  std::string problem;    // why the driver does not work; empty: it does
  std::vector<Gpu> gpus;  // visible with this environment
};

// Whether NVIDIA's driver shows a device node below `root` ("": /).
bool NvidiaIsVisible(const std::string& root);

// Runs the worker with `environment` (NAME=VALUE) as the calling user; blocks
// for as long as the driver takes, at most a minute.
absl::StatusOr<GpuFacts> ProbeGpus(const std::string& worker_binary,
                                   const std::vector<std::string>& environment);

// The probe's answer: the last line of `output`, JSON. Anything may stand
// before it.
absl::StatusOr<GpuFacts> ParseGpuFacts(absl::string_view output);

}  // namespace slidedp::hostd
