// The ops of a GPU, whatever this build supports (see
// common/device/accelerator.h).
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "common/device/device.h"
#include "worker/ops/ops.h"

namespace slidedp::ops {

struct AcceleratorOpsOptions {
  // Activations and all arithmetic in float32: for comparison with references.
  bool float32 = false;
  // Bitwise repeatable (`deterministic` of the job).
  bool deterministic = false;
};

absl::StatusOr<std::unique_ptr<Ops>> NewAcceleratorOps(
    device::Device& device, const AcceleratorOpsOptions& options);

// Runs `rehearsal`, which calls every op with each shape and on the very
// buffers that steps will use. Algorithms are timed, workspace allocated and
// kernels loaded; what the ops write is undefined. From then on linear and
// attention refuse shapes that were not rehearsed: nothing is planned, loaded
// or allocated while a stream may wait for a word. `ops` must come from
// NewAcceleratorOps.
absl::Status WarmUpAcceleratorOps(
    Ops& ops, const std::function<absl::Status()>& rehearsal);

// Device memory that the ops share; final after the warm-up.
size_t AcceleratorOpsWorkspaceBytes(const Ops& ops);

}  // namespace slidedp::ops
