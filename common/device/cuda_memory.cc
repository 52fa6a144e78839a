#include "common/device/cuda_memory.h"

#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/base/check.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/device/cuda_status.h"

namespace slidedp::device {
namespace {

struct Live {
  std::shared_ptr<CudaContext> context;
  void* base;  // as CUDA handed it out; Buffer's data may lie higher
};

// Whose a live allocation is: Buffer's `free` gets no context.
struct LiveAllocations {
  std::mutex mutex;
  std::unordered_map<void*, Live> by_data;
};

LiveAllocations& Allocations() {
  // Never destroyed: a buffer may be freed by a static's destructor.
  static LiveAllocations* live = new LiveAllocations;
  return *live;
}

void LogFailure(const absl::Status& status) {
  if (!status.ok())
    spdlog::error("freeing GPU memory: {}", std::string(status.message()));
}

void Free(void* data, size_t bytes) {
  Live live;
  {
    std::lock_guard<std::mutex> lock(Allocations().mutex);
    auto node = Allocations().by_data.extract(data);
    SDP_CHECK(!node.empty(), "a buffer was freed twice");
    live = std::move(node.mapped());
  }
  CudaContext& context = *live.context;
  const std::optional<MemoryRange> range = context.memory.Remove(data);
  SDP_CHECK(range.has_value(), "a buffer was not in the memory map");
  {
    std::lock_guard<std::mutex> lock(context.mutex);
    (range->host() ? context.pinned_bytes : context.allocated_bytes) -= bytes;
  }
  if (context.abandoned.load() || !context.Use().ok()) return;
  LogFailure(range->host() ? CudaStatus(cudaFreeHost(live.base), "cudaFreeHost")
                           : CudaStatus(cudaFree(live.base), "cudaFree"));
}

std::string MemlockLimit() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "unknown";
  if (limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return FormatBytes(limit.rlim_cur);
}

absl::Status PinningFailed(absl::StatusCode code, absl::string_view what,
                           size_t bytes, const absl::Status& why) {
  return absl::Status(
      code,
      absl::StrCat(what, ": ", FormatBytes(bytes), " (", bytes,
                   " bytes) of host memory can't be pinned for the GPU (host "
                   "memory, not the GPU's; RLIMIT_MEMLOCK is ",
                   MemlockLimit(), "): ", why.message()));
}

absl::Status DeviceMemoryShort(CudaContext& context, absl::string_view name,
                               size_t bytes, absl::string_view why) {
  size_t free_bytes = 0, total_bytes = 0;
  cudaMemGetInfo(&free_bytes, &total_bytes);
  cudaGetLastError();
  std::lock_guard<std::mutex> lock(context.mutex);
  return absl::ResourceExhaustedError(
      absl::StrCat(name, ": ", FormatBytes(bytes), " (", bytes,
                   " bytes) can't be allocated on ", context.description,
                   ", of which ", FormatBytes(free_bytes), " of ",
                   FormatBytes(total_bytes), " are free; this process holds ",
                   FormatBytes(context.allocated_bytes), ": ", why));
}

// At most two tries: the second is larger by a page, to cut a page-aligned
// range from.
absl::Status MallocPageAligned(size_t bytes, void*& base, void*& data) {
  SDP_RETURN_IF_CUDA_ERROR(cudaMalloc(&base, bytes));
  if (reinterpret_cast<uintptr_t>(base) % kPageBytes != 0) {
    SDP_RETURN_IF_CUDA_ERROR(cudaFree(base));
    SDP_RETURN_IF_CUDA_ERROR(cudaMalloc(&base, bytes + kPageBytes));
  }
  data = reinterpret_cast<void*>(
      AlignUp(reinterpret_cast<uintptr_t>(base), kPageBytes));
  return absl::OkStatus();
}

absl::Status Track(const std::shared_ptr<CudaContext>& context, void* base,
                   void* data, size_t bytes, MemoryRange::Kind kind,
                   void* device_data) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  SDP_RETURN_IF_ERROR(context->memory.Add(
      {begin, begin + bytes, reinterpret_cast<uintptr_t>(device_data), kind,
       /*read_only=*/false}));
  std::lock_guard<std::mutex> lock(Allocations().mutex);
  Allocations().by_data[data] = {context, base};
  return absl::OkStatus();
}

absl::StatusOr<Buffer> AllocateDevice(
    const std::shared_ptr<CudaContext>& context, absl::string_view name,
    size_t bytes) {
  size_t limit;
  {
    std::lock_guard<std::mutex> lock(context->mutex);
    limit = context->memory_limit_bytes;
  }
  if (limit != 0) {
    size_t free_bytes = 0, total_bytes = 0;
    SDP_RETURN_IF_CUDA_ERROR(cudaMemGetInfo(&free_bytes, &total_bytes));
    const size_t used_bytes = total_bytes - free_bytes;
    if (bytes > limit - std::min(limit, used_bytes)) {
      return DeviceMemoryShort(
          *context, name, bytes,
          absl::StrCat(FormatBytes(used_bytes),
                       " are in use and the limit set for it is ",
                       FormatBytes(limit)));
    }
  }
  void *base = nullptr, *data = nullptr;
  const absl::Status status = MallocPageAligned(bytes, base, data);
  if (!status.ok()) {
    return DeviceMemoryShort(*context, name, bytes, status.message());
  }
  SDP_RETURN_IF_ERROR(
      Track(context, base, data, bytes, MemoryRange::Kind::kDevice, data));
  {
    std::lock_guard<std::mutex> lock(context->mutex);
    context->allocated_bytes += bytes;
    context->allocated_peak_bytes =
        std::max(context->allocated_peak_bytes, context->allocated_bytes);
    size_t free_bytes = 0, total_bytes = 0;
    SDP_RETURN_IF_CUDA_ERROR(cudaMemGetInfo(&free_bytes, &total_bytes));
    context->used_peak_bytes =
        std::max(context->used_peak_bytes, total_bytes - free_bytes);
  }
  Buffer buffer(data, bytes, &Free);
  SDP_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(data, 0, bytes, context->service));
  SDP_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(context->service));
  return buffer;
}

absl::StatusOr<Buffer> AllocatePinned(
    const std::shared_ptr<CudaContext>& context, absl::string_view name,
    size_t bytes) {
  void *data = nullptr, *device_data = nullptr;
  // cudaHostAlloc gives whole pages.
  const absl::Status status = CudaStatus(
      cudaHostAlloc(&data, bytes, cudaHostAllocPortable | cudaHostAllocMapped),
      "cudaHostAlloc");
  if (!status.ok()) {
    return PinningFailed(absl::StatusCode::kResourceExhausted, name, bytes,
                         status);
  }
  SDP_RETURN_IF_CUDA_ERROR(cudaHostGetDevicePointer(&device_data, data, 0));
  std::memset(data, 0, bytes);
  SDP_RETURN_IF_ERROR(Track(context, data, data, bytes,
                            MemoryRange::Kind::kPinned, device_data));
  std::lock_guard<std::mutex> lock(context->mutex);
  context->pinned_bytes += bytes;
  return Buffer(data, bytes, &Free);
}

class CudaRegistration : public HostRegistration {
 public:
  explicit CudaRegistration(std::shared_ptr<CudaContext> context)
      : context_(std::move(context)) {}
  ~CudaRegistration() override {
    for (void* piece : pieces_) {
      context_->memory.Remove(piece);
      if (context_->abandoned.load() || !context_->Use().ok()) continue;
      LogFailure(CudaStatus(cudaHostUnregister(piece), "cudaHostUnregister"));
    }
  }

  absl::Status Add(void* data, size_t bytes, bool read_only) {
    unsigned flags = cudaHostRegisterPortable | cudaHostRegisterMapped;
    if (read_only) flags |= cudaHostRegisterReadOnly;
    const absl::Status status =
        CudaStatus(cudaHostRegister(data, bytes, flags), "cudaHostRegister");
    if (!status.ok()) {
      return PinningFailed(
          status.code(),
          read_only ? "registering read-only memory" : "registering memory",
          bytes, status);
    }
    pieces_.push_back(data);
    void* device_data = nullptr;
    SDP_RETURN_IF_CUDA_ERROR(cudaHostGetDevicePointer(&device_data, data, 0));
    const auto begin = reinterpret_cast<uintptr_t>(data);
    return context_->memory.Add({begin, begin + bytes,
                                 reinterpret_cast<uintptr_t>(device_data),
                                 MemoryRange::Kind::kRegistered, read_only});
  }

 private:
  const std::shared_ptr<CudaContext> context_;
  std::vector<void*> pieces_;
};

}  // namespace

absl::StatusOr<Buffer> AllocateCuda(const std::shared_ptr<CudaContext>& context,
                                    absl::string_view name, size_t bytes,
                                    Memory where) {
  if (bytes == 0) return Buffer();
  SDP_RETURN_IF_ERROR(context->Use());
  return where == Memory::kDevice ? AllocateDevice(context, name, bytes)
                                  : AllocatePinned(context, name, bytes);
}

absl::StatusOr<std::unique_ptr<HostRegistration>> RegisterCudaHost(
    std::shared_ptr<CudaContext> context, void* data, size_t bytes,
    bool read_only) {
  if (data == nullptr || bytes == 0) {
    return absl::InvalidArgumentError("registering an empty memory range");
  }
  SDP_RETURN_IF_ERROR(context->Use());
  const size_t piece_bytes = context->options.registration_piece_bytes;
  auto registration = std::make_unique<CudaRegistration>(std::move(context));
  for (size_t at = 0; at < bytes; at += piece_bytes) {
    SDP_RETURN_IF_ERROR(registration->Add(static_cast<char*>(data) + at,
                                          std::min(piece_bytes, bytes - at),
                                          read_only));
  }
  return registration;
}

}  // namespace slidedp::device
