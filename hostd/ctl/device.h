// Which device a job computes on. Decided here, as the user, and written into
// the spec: the daemon does not guess.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "hostd/launch/gpu_probe.h"
#include "proto/job.pb.h"

namespace slidedp::ctl {

// The GPUs that workers started by this user would see (hostd::ProbeGpus).
// NotFound, at once, where no NVIDIA driver is.
using FindGpus = std::function<absl::StatusOr<hostd::GpuFacts>()>;

struct ChosenDevice {
  v1::DeviceKind device = v1::DEVICE_KIND_CPU;  // or CUDA
  uint64_t gpu_memory_bytes = 0;  // of the smallest GPU visible; CPU: 0
  std::string warning;            // why auto is the CPU though there are GPUs
};

// `asked` is the spec's device. auto: a GPU if there is one that works. `ranks`
// GPUs must be there; 0: any number.
absl::StatusOr<ChosenDevice> ChooseDevice(v1::DeviceKind asked, uint32_t ranks,
                                          absl::string_view file,
                                          const FindGpus& find_gpus);

}  // namespace slidedp::ctl
