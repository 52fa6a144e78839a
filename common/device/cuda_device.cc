#include "common/device/cuda_device.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "common/base/status.h"
#include "common/base/units.h"
#include "common/device/cuda_clock.h"
#include "common/device/cuda_memory.h"
#include "common/device/cuda_status.h"
#include "common/device/cuda_stream.h"

namespace slidedp::device {
namespace {

class CudaDevice : public Device {
 public:
  CudaDevice(std::shared_ptr<CudaContext> context,
             std::unique_ptr<CudaClock> clock)
      : context_(std::move(context)), clock_(std::move(clock)) {}

  const std::shared_ptr<CudaContext>& context() const { return context_; }

  Kind kind() const override { return Kind::kCuda; }
  std::string description() const override { return context_->description; }

  absl::StatusOr<Buffer> Allocate(absl::string_view name, size_t bytes,
                                  Memory where) override {
    return AllocateCuda(context_, name, bytes, where);
  }
  size_t allocated_bytes() const override {
    std::lock_guard<std::mutex> lock(context_->mutex);
    return context_->allocated_bytes + context_->pinned_bytes;
  }
  absl::StatusOr<std::unique_ptr<HostRegistration>> RegisterHost(
      void* data, size_t bytes, bool read_only) override {
    return RegisterCudaHost(context_, data, bytes, read_only);
  }

  absl::StatusOr<std::unique_ptr<Stream>> NewStream(
      absl::string_view name) override {
    return CudaStream::Create(name, context_);
  }
  absl::StatusOr<std::unique_ptr<Event>> NewEvent() override {
    SDP_RETURN_IF_ERROR(context_->Use());
    cudaEvent_t event;
    SDP_RETURN_IF_CUDA_ERROR(
        cudaEventCreateWithFlags(&event, cudaEventBlockingSync));
    return std::make_unique<CudaEvent>(event);
  }

  absl::Status Copy(void* dst, const void* src, size_t bytes,
                    Stream& stream) override {
    SDP_ASSIGN_OR_RETURN(cudaStream_t handle, UseCudaStream(stream));
    SDP_RETURN_IF_ERROR(CheckMemory("copy", dst, bytes));
    SDP_RETURN_IF_ERROR(CheckMemory("copy", src, bytes));
    SDP_RETURN_IF_ERROR(CheckWritable("copy", dst));
    // A copy may not run across two registrations.
    while (bytes > 0) {
      const size_t piece = std::min(context_->memory.Contiguous(dst, bytes),
                                    context_->memory.Contiguous(src, bytes));
      SDP_RETURN_IF_CUDA_ERROR(
          cudaMemcpyAsync(dst, src, piece, cudaMemcpyDefault, handle));
      dst = static_cast<char*>(dst) + piece;
      src = static_cast<const char*>(src) + piece;
      bytes -= piece;
    }
    return absl::OkStatus();
  }

  absl::Status FillZero(void* dst, size_t bytes, Stream& stream) override {
    SDP_ASSIGN_OR_RETURN(cudaStream_t handle, UseCudaStream(stream));
    SDP_RETURN_IF_ERROR(CheckMemory("fill", dst, bytes));
    SDP_RETURN_IF_ERROR(CheckWritable("fill", dst));
    if (bytes == 0) return absl::OkStatus();
    SDP_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(dst, 0, bytes, handle));
    return absl::OkStatus();
  }

  absl::Status Record(Event& event, Stream& stream) override {
    SDP_ASSIGN_OR_RETURN(cudaStream_t handle, UseCudaStream(stream));
    SDP_ASSIGN_OR_RETURN(CudaEvent * cuda_event, AsCudaEvent(event));
    SDP_RETURN_IF_CUDA_ERROR(cudaEventRecord(cuda_event->handle(), handle));
    cuda_event->set_recorded();
    return absl::OkStatus();
  }

  absl::Status Wait(Event& event, Stream& stream) override {
    SDP_ASSIGN_OR_RETURN(cudaStream_t handle, UseCudaStream(stream));
    SDP_ASSIGN_OR_RETURN(CudaEvent * cuda_event, AsCudaEvent(event));
    if (!cuda_event->recorded()) return absl::OkStatus();
    SDP_RETURN_IF_CUDA_ERROR(
        cudaStreamWaitEvent(handle, cuda_event->handle(), 0));
    return absl::OkStatus();
  }

  absl::Status WaitWord(const std::atomic<uint64_t>* word, uint64_t at_least,
                        Stream& stream) override {
    SDP_ASSIGN_OR_RETURN(cudaStream_t handle, UseCudaStream(stream));
    SDP_ASSIGN_OR_RETURN(const CUdeviceptr address, WordAddress(word, false));
    SDP_RETURN_IF_CUDA_ERROR(context_->driver.stream_wait_value64(
        handle, address, at_least, CU_STREAM_WAIT_VALUE_GEQ));
    return absl::OkStatus();
  }

  absl::Status WriteWord(std::atomic<uint64_t>* word, uint64_t value,
                         Stream& stream) override {
    SDP_ASSIGN_OR_RETURN(cudaStream_t handle, UseCudaStream(stream));
    SDP_ASSIGN_OR_RETURN(const CUdeviceptr address, WordAddress(word, true));
    // The default flags put a system-wide barrier before the write.
    SDP_RETURN_IF_CUDA_ERROR(context_->driver.stream_write_value64(
        handle, address, value, CU_STREAM_WRITE_VALUE_DEFAULT));
    return absl::OkStatus();
  }

  absl::Status Synchronize(Stream& stream) override {
    SDP_ASSIGN_OR_RETURN(cudaStream_t handle, UseCudaStream(stream));
    return Annotate(
        CudaStatus(cudaStreamSynchronize(handle), "cudaStreamSynchronize"),
        absl::StrCat("stream ", stream.name()));
  }

  absl::Status Synchronize(Event& event) override {
    SDP_ASSIGN_OR_RETURN(CudaEvent * cuda_event, AsCudaEvent(event));
    if (!cuda_event->recorded()) return absl::OkStatus();
    SDP_RETURN_IF_ERROR(context_->Use());
    SDP_RETURN_IF_CUDA_ERROR(cudaEventSynchronize(cuda_event->handle()));
    return absl::OkStatus();
  }

  absl::StatusOr<int64_t> TimestampNs(Event& event) override {
    SDP_ASSIGN_OR_RETURN(CudaEvent * cuda_event, AsCudaEvent(event));
    if (!cuda_event->recorded()) {
      return absl::FailedPreconditionError("the event was never recorded");
    }
    SDP_RETURN_IF_ERROR(context_->Use());
    const cudaError_t state = cudaEventQuery(cuda_event->handle());
    if (state == cudaErrorNotReady) {
      cudaGetLastError();
      return absl::FailedPreconditionError(
          "the event's record is not passed yet; synchronize it first");
    }
    SDP_RETURN_IF_ERROR(CudaStatus(state, "cudaEventQuery"));
    return clock_->Resolve(cuda_event->handle());
  }

 private:
  static absl::Status CheckMemory(absl::string_view what, const void* data,
                                  size_t bytes) {
    if (data != nullptr || bytes == 0) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(what, " of ", bytes, " bytes at a null pointer"));
  }

  absl::Status CheckWritable(absl::string_view what, const void* dst) const {
    const std::optional<MemoryRange> range = context_->memory.Find(dst);
    if (!range.has_value() || !range->read_only) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(what, " into memory registered read-only"));
  }

  absl::StatusOr<CUdeviceptr> WordAddress(const std::atomic<uint64_t>* word,
                                          bool write) const {
    const auto address = reinterpret_cast<uintptr_t>(word);
    if (word == nullptr || address % alignof(std::atomic<uint64_t>) != 0) {
      return absl::InvalidArgumentError(
          "a word must be a non-null pointer to 8 aligned bytes");
    }
    const std::optional<MemoryRange> range = context_->memory.Find(word);
    if (!range.has_value() || !range->host() ||
        range->end - address < sizeof(uint64_t)) {
      return absl::InvalidArgumentError(
          "a word must be in registered or pinned host memory");
    }
    if (write && range->read_only) {
      return absl::InvalidArgumentError(
          "a word in memory registered read-only can't be written");
    }
    return range->device_begin + (address - range->begin);
  }

  const std::shared_ptr<CudaContext> context_;
  const std::unique_ptr<CudaClock> clock_;
};

absl::StatusOr<CudaDevice*> AsCuda(Device& device) {
  auto* cuda = dynamic_cast<CudaDevice*>(&device);
  if (cuda == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("device ", device.description(), " is not a CUDA device"));
  }
  return cuda;
}

absl::Status ReadProperties(CudaContext& context) {
  cudaDeviceProp p;
  SDP_RETURN_IF_CUDA_ERROR(cudaGetDeviceProperties(&p, context.options.index));
  context.properties = {context.options.index, p.multiProcessorCount, p.major,
                        p.minor, p.sharedMemPerBlockOptin};
  context.description = absl::StrCat(p.name, " (sm_", p.major, p.minor, ")");
  if (p.major < 8) {
    return absl::UnavailableError(
        absl::StrCat(context.description,
                     " computes no BF16; compute capability 8.0 "
                     "(NVIDIA Ampere) or newer is needed"));
  }
  int read_only = 0;
  SDP_RETURN_IF_CUDA_ERROR(cudaDeviceGetAttribute(
      &read_only, cudaDevAttrHostRegisterReadOnlySupported,
      context.options.index));
  int same_address = 0;
  SDP_RETURN_IF_CUDA_ERROR(cudaDeviceGetAttribute(
      &same_address, cudaDevAttrCanUseHostPointerForRegisteredMem,
      context.options.index));
  if (read_only == 0 || same_address == 0) {
    return absl::UnavailableError(absl::StrCat(
        context.description,
        " or its driver can't read registered host memory ",
        read_only == 0 ? "that is mapped read-only, as parameters are handed "
                         "to workers"
                       : "at the host's address"));
  }
  return absl::OkStatus();
}

}  // namespace

void PrepareCudaProcess() {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/1);
  setenv("NCCL_RUNTIME_CONNECT", "0", /*overwrite=*/1);
}

absl::StatusOr<int> CudaDeviceCount() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorInsufficientDriver) {
    cudaGetLastError();
    return absl::UnavailableError(
        "no NVIDIA driver, or one older than CUDA 13 needs (580)");
  }
  SDP_RETURN_IF_ERROR(CudaStatus(error, "cudaGetDeviceCount"));
  if (count == 0) return absl::UnavailableError("no GPU is visible");
  return count;
}

absl::StatusOr<std::unique_ptr<Device>> NewCudaDevice(
    const CudaOptions& options) {
  SDP_ASSIGN_OR_RETURN(const int count, CudaDeviceCount());
  if (options.index < 0 || options.index >= count) {
    return absl::InvalidArgumentError(absl::StrCat(
        "GPU ", options.index, " was asked for, but this process sees ", count,
        "; check CUDA_VISIBLE_DEVICES"));
  }
  if (options.registration_piece_bytes == 0 ||
      options.registration_piece_bytes % kPageBytes != 0) {
    return absl::InvalidArgumentError(
        "registration_piece_bytes must be whole pages");
  }
  auto context = std::make_shared<CudaContext>();
  context->options = options;
  context->memory_limit_bytes = options.memory_limit_bytes;
  // A host thread that waits for the GPU sleeps: the cores belong to the
  // update.
  SDP_RETURN_IF_CUDA_ERROR(cudaInitDevice(
      options.index, cudaDeviceScheduleBlockingSync | cudaDeviceMapHost,
      cudaInitDeviceFlagsAreValid));
  SDP_RETURN_IF_ERROR(context->Use());
  SDP_RETURN_IF_ERROR(ReadProperties(*context));
  SDP_ASSIGN_OR_RETURN(context->driver, LoadCudaDriver());
  SDP_RETURN_IF_CUDA_ERROR(
      cudaStreamCreateWithFlags(&context->service, cudaStreamNonBlocking));
  SDP_ASSIGN_OR_RETURN(auto clock, CudaClock::Create(context->service));
  return std::make_unique<CudaDevice>(std::move(context), std::move(clock));
}

absl::StatusOr<CudaMemory> QueryCudaMemory(Device& device) {
  SDP_ASSIGN_OR_RETURN(CudaDevice * cuda, AsCuda(device));
  CudaContext& context = *cuda->context();
  SDP_RETURN_IF_ERROR(context.Use());
  size_t free_bytes = 0, total_bytes = 0;
  SDP_RETURN_IF_CUDA_ERROR(cudaMemGetInfo(&free_bytes, &total_bytes));
  std::lock_guard<std::mutex> lock(context.mutex);
  const size_t used_bytes = total_bytes - free_bytes;
  context.used_peak_bytes = std::max(context.used_peak_bytes, used_bytes);
  return CudaMemory{context.allocated_bytes, context.allocated_peak_bytes,
                    used_bytes, context.used_peak_bytes, total_bytes};
}

absl::Status SetCudaMemoryLimit(Device& device, size_t bytes) {
  SDP_ASSIGN_OR_RETURN(CudaDevice * cuda, AsCuda(device));
  CudaContext& context = *cuda->context();
  std::lock_guard<std::mutex> lock(context.mutex);
  context.memory_limit_bytes = bytes;
  return absl::OkStatus();
}

absl::StatusOr<CudaProperties> QueryCudaProperties(const Device& device) {
  SDP_ASSIGN_OR_RETURN(CudaDevice * cuda, AsCuda(const_cast<Device&>(device)));
  return cuda->context()->properties;
}

absl::StatusOr<std::shared_ptr<CudaContext>> CudaContextOf(Device& device) {
  SDP_ASSIGN_OR_RETURN(CudaDevice * cuda, AsCuda(device));
  return cuda->context();
}

}  // namespace slidedp::device
