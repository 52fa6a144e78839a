#include "tests/bench/host_bench.h"

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "common/base/clock.h"
#include "common/base/status.h"

namespace slidedp::bench {
namespace {

// One call of `work` on the host: the median of several.
double HostSeconds(int repeats, const std::function<void()>& work) {
  std::vector<double> seconds;
  for (int i = 0; i < repeats; ++i) {
    const int64_t begin_ns = MonotonicNs();
    work();
    seconds.push_back(static_cast<double>(MonotonicNs() - begin_ns) * 1e-9);
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

// A device that takes the unit, and where it comes from.
struct Receiver {
  std::unique_ptr<Machine> machine;
  std::unique_ptr<device::HostRegistration> registration;
  device::Buffer pinned;  // as much as one chunk
  void* to = nullptr;
};

absl::StatusOr<Receiver> NewReceiver(const HostOptions& options,
                                     const HostUnit& unit, int gpu) {
  Receiver receiver;
  MachineOptions machine = options.machine;
  machine.gpu = gpu;
  SDP_ASSIGN_OR_RETURN(receiver.machine, Machine::Create(machine));
  device::Device& device = receiver.machine->device();
  const uint64_t bytes = unit.parameters() * sizeof(bf16);
  // Registration is by whole pages; the plane begins at one.
  SDP_ASSIGN_OR_RETURN(receiver.registration,
                       device.RegisterHost(const_cast<bf16*>(unit.hi()), bytes,
                                           /*read_only=*/true));
  SDP_ASSIGN_OR_RETURN(receiver.to, receiver.machine->Zeros("unit", bytes));
  SDP_ASSIGN_OR_RETURN(
      receiver.pinned,
      device.Allocate("pinned", bytes, device::Memory::kPinnedHost));
  return receiver;
}

absl::Status Enqueue(Receiver& receiver, const void* from, uint64_t bytes,
                     uint64_t chunk_bytes) {
  for (uint64_t at = 0; at < bytes; at += chunk_bytes) {
    SDP_RETURN_IF_ERROR(receiver.machine->device().Copy(
        static_cast<char*>(receiver.to) + at,
        static_cast<const char*>(from) + at, std::min(chunk_bytes, bytes - at),
        receiver.machine->stream()));
  }
  return absl::OkStatus();
}

// Seconds until every receiver has all of it.
absl::StatusOr<double> DeliverySeconds(const HostOptions& options,
                                       std::vector<Receiver>& receivers,
                                       const HostUnit& unit, bool pinned) {
  const uint64_t bytes = unit.parameters() * sizeof(bf16);
  std::vector<double> seconds;
  for (int i = 0; i < options.repeats; ++i) {
    const int64_t begin_ns = MonotonicNs();
    for (Receiver& receiver : receivers) {
      const void* from = pinned ? receiver.pinned.data() : unit.hi();
      SDP_RETURN_IF_ERROR(Enqueue(receiver, from, bytes, options.chunk_bytes));
    }
    for (Receiver& receiver : receivers) {
      SDP_RETURN_IF_ERROR(
          receiver.machine->device().Synchronize(receiver.machine->stream()));
    }
    seconds.push_back(static_cast<double>(MonotonicNs() - begin_ns) * 1e-9);
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

}  // namespace

absl::Status BenchDelivery(const HostOptions& options, HostUnit& unit) {
  std::vector<Receiver> receivers;
  for (int gpu = 0; gpu < options.gpus; ++gpu) {
    SDP_ASSIGN_OR_RETURN(Receiver receiver, NewReceiver(options, unit, gpu));
    receivers.push_back(std::move(receiver));
  }
  SDP_RETURN_IF_ERROR(
      DeliverySeconds(options, receivers, unit, false).status());
  SDP_ASSIGN_OR_RETURN(const double pinned,
                       DeliverySeconds(options, receivers, unit, true));
  SDP_ASSIGN_OR_RETURN(const double alone,
                       DeliverySeconds(options, receivers, unit, false));
  const double update_alone = HostSeconds(
      options.repeats, [&] { unit.Update(options.contending_threads); });
  double contended = 0, updated_per_second = 0;
  {
    HostUnit::Background update(unit, options.contending_threads);
    const int64_t begin_ns = MonotonicNs();
    const uint64_t begin = update.updated();
    SDP_ASSIGN_OR_RETURN(contended,
                         DeliverySeconds(options, receivers, unit, false));
    updated_per_second = static_cast<double>(update.updated() - begin) /
                         (static_cast<double>(MonotonicNs() - begin_ns) * 1e-9);
  }
  const auto bytes = static_cast<double>(unit.parameters() * sizeof(bf16));
  const double host_bytes_per_second =
      26 * updated_per_second +
      static_cast<double>(receivers.size()) * bytes / contended;
  Result result;
  result.bench = "delivery-800m";
  result.value = pinned / alone;
  result.unit = "share of the rate of pinned copies";
  result.target = ">= 0.95";
  result.detail = Json{
      {"device", receivers[0].machine->name()},
      {"devices", receivers.size()},
      {"parameters", unit.parameters()},
      {"chunk_bytes", options.chunk_bytes},
      {"gigabytes_per_second_each", bytes / alone * 1e-9},
      {"pinned_gigabytes_per_second_each", bytes / pinned * 1e-9},
      {"contended_gigabytes_per_second_each", bytes / contended * 1e-9},
      {"update_threads", options.contending_threads},
      {"updates_per_second_alone",
       static_cast<double>(unit.parameters()) / update_alone},
      {"updates_per_second_contended", updated_per_second},
      {"host_gigabytes_per_second_contended", host_bytes_per_second * 1e-9}};
  SDP_RETURN_IF_ERROR(Report(result, options.origin));
  result.bench = "delivery-800m-contended";
  result.value = contended / alone;
  result.unit = "slowdown beside an update";
  result.target = "<= 1.3, or at the host's bandwidth";
  return Report(result, options.origin);
}

}  // namespace slidedp::bench
