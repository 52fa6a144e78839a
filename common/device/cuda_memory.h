// Allocation and registration of the CUDA device. Private to this folder.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "common/device/cuda_stream.h"

namespace slidedp::device {

absl::StatusOr<Buffer> AllocateCuda(const std::shared_ptr<CudaContext>& context,
                                    absl::string_view name, size_t bytes,
                                    Memory where);

absl::StatusOr<std::unique_ptr<HostRegistration>> RegisterCudaHost(
    std::shared_ptr<CudaContext> context, void* data, size_t bytes,
    bool read_only);

}  // namespace slidedp::device
