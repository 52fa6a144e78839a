// The driver calls that the runtime lacks, found at run time: a binary needs no
// libcuda to start, so a machine without a driver gets a message and not a
// loader error.
#pragma once

#include <cuda.h>

#include "absl/status/statusor.h"

namespace slidedp::device {

struct CudaDriver {
  CUresult (*stream_wait_value64)(CUstream, CUdeviceptr, cuuint64_t,
                                  unsigned int flags);
  CUresult (*stream_write_value64)(CUstream, CUdeviceptr, cuuint64_t,
                                   unsigned int flags);
};

absl::StatusOr<CudaDriver> LoadCudaDriver();

}  // namespace slidedp::device
