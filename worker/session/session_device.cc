// The rank's device, its meeting with the other ranks, and the watch over both.
#include <algorithm>
#include <chrono>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/collective/accelerator_collective.h"
#include "common/collective/exchange.h"
#include "proto/protocol.h"
#include "worker/ops/accelerator_ops.h"
#include "worker/session/session.h"

namespace slidedp::session {
namespace {

// A backstop only: the daemon sees a lost rank long before and aborts.
constexpr int64_t kCollectiveDeadlineNs = int64_t{600} * 1'000'000'000;
constexpr auto kDeviceCheckInterval = std::chrono::seconds(1);

}  // namespace

absl::Status Session::OpenDevice() {
  std::vector<device::AcceleratorInfo> gpus;
  if (config_.device != DeviceChoice::kCpu) {
    SDP_ASSIGN_OR_RETURN(gpus, device::ListAccelerators());
  }
  if (config_.device == DeviceChoice::kCpu ||
      (config_.device == DeviceChoice::kAuto && gpus.empty())) {
    device_ = device::NewCpuDevice({});
    return absl::OkStatus();
  }
  device::AcceleratorOptions options;
  options.rank = static_cast<int>(config_.rank);
  SDP_ASSIGN_OR_RETURN(device_, device::NewAccelerator(options));
  SDP_ASSIGN_OR_RETURN(const int index, device::AcceleratorIndex(*device_));
  gpu_ = gpus.at(static_cast<size_t>(index));
  return absl::OkStatus();
}

absl::Status Session::MakeOps() {
  const policy::Plan& plan = proposal_->plan;
  if (!on_gpu()) {
    ops_ = ops::NewCpuOps(plan.compute_threads);
    return absl::OkStatus();
  }
  ops::AcceleratorOpsOptions options;
  options.float32 = plan.float32;
  options.deterministic = plan.deterministic;
  SDP_ASSIGN_OR_RETURN(ops_, ops::NewAcceleratorOps(*device_, options));
  return absl::OkStatus();
}

absl::StatusOr<v1::CollectiveIds> Session::MeetOtherRanks() {
  if (config_.rank == 0) {
    v1::WorkerMessage message;
    for (int i = 0; i < policy::kCommunicators; ++i) {
      SDP_ASSIGN_OR_RETURN(std::string id,
                           collective::NewAcceleratorCollectiveId());
      message.mutable_collective_ids()->add_ids(std::move(id));
    }
    Send(message);
  }
  v1::DaemonMessage answer = NextMessage();
  bool good = answer.has_collective_ids() &&
              answer.collective_ids().ids_size() == policy::kCommunicators;
  for (const std::string& id : answer.collective_ids().ids()) {
    good &= id.size() == kCollectiveIdBytes;
  }
  if (!good) {
    return absl::InternalError(
        "the daemon did not send the ranks' collective ids; slidedpd and "
        "slidedp-worker must be of one release");
  }
  return answer.collective_ids();
}

absl::Status Session::JoinCollectives() {
  const policy::Plan& plan = proposal_->plan;
  if (plan.ranks == 1) return absl::OkStatus();
  const int rank = static_cast<int>(config_.rank);
  std::unique_ptr<collective::Collective>* collectives[] = {&param_collective_,
                                                            &grad_collective_};
  constexpr size_t kStagingBytes[] = {collective::kParamStagingBytes,
                                      collective::kGradStagingBytes};
  static_assert(std::size(collectives) == policy::kCommunicators);
  if (on_gpu()) {
    SDP_ASSIGN_OR_RETURN(const v1::CollectiveIds ids, MeetOtherRanks());
    for (size_t i = 0; i < std::size(collectives); ++i) {
      SDP_ASSIGN_OR_RETURN(
          collective::AcceleratorCollective joined,
          collective::NewAcceleratorCollective(
              *device_, ids.ids(static_cast<int>(i)), rank, plan.ranks,
              kStagingBytes[i], kCollectiveDeadlineNs));
      *collectives[i] = std::move(joined.collective);
      collective_checks_.push_back(std::move(joined.check));
    }
    return absl::OkStatus();
  }
  const shm::Mapping* exchange = attachment_->exchange();
  const size_t staging = policy::ExchangeStagingBytes(plan);
  const size_t region = collective::ExchangeBytes(plan.ranks, staging);
  for (size_t i = 0; i < std::size(collectives); ++i) {
    SDP_ASSIGN_OR_RETURN(*collectives[i],
                         collective::NewShmCollective(
                             *device_, exchange->at<char>(i * region), region,
                             rank, plan.ranks, staging, kCollectiveDeadlineNs));
  }
  return absl::OkStatus();
}

// With everything allocated: what libraries take can't be refused beforehand.
absl::Status Session::CheckDeviceMemory() {
  if (!on_gpu()) {
    spdlog::info("job {}: {}, {} of device memory", config_.job,
                 device_->description(), FormatBytes(trainer_->device_bytes()));
    return absl::OkStatus();
  }
  SDP_ASSIGN_OR_RETURN(const device::AcceleratorMemory memory,
                       device::QueryAcceleratorMemory(*device_));
  const uint64_t buffers = trainer_->device_bytes();
  const uint64_t others =
      memory.used_peak_bytes - std::min(buffers, memory.used_peak_bytes);
  spdlog::info(
      "job {}: {}: {} of {} in use: {} of buffers and workspace, {} of CUDA, "
      "its libraries and others",
      config_.job, device_->description(), FormatBytes(memory.used_peak_bytes),
      FormatBytes(memory.total_bytes), FormatBytes(buffers),
      FormatBytes(others));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    device_peak_bytes_ = memory.used_peak_bytes;
  }
  const uint64_t limit = proposal_->plan.gpu_memory_limit_bytes;
  if (limit == 0 || memory.used_peak_bytes <= limit) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      device_->description(), ": ", FormatBytes(memory.used_peak_bytes),
      " are in use, ", FormatBytes(others),
      " of them by CUDA, its libraries and others; the job's limit is ",
      FormatBytes(limit),
      "; raise tuning.gpu_memory_limit_gib, or keep fewer layers"));
}

uint64_t Session::DevicePeakBytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  return device_peak_bytes_;
}

// Apart from Watch: a call into the driver may wait for the GPU, heartbeats and
// the abort word must not.
void Session::WatchDevice() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!changed_.wait_for(lock, kDeviceCheckInterval,
                            [this] { return stopping_ || leaving_; })) {
    lock.unlock();
    absl::Status status;
    for (const auto& check : collective_checks_) {
      if (status.ok()) status = check();
    }
    const absl::StatusOr<device::AcceleratorMemory> memory =
        device::QueryAcceleratorMemory(*device_);
    if (status.ok()) status = memory.status();
    lock.lock();
    if (leaving_) return;  // ranks that leave are no news
    if (!status.ok()) {
      lock.unlock();
      Fail(status);
    }
    device_peak_bytes_ = std::max(device_peak_bytes_, memory->used_peak_bytes);
  }
}

}  // namespace slidedp::session
