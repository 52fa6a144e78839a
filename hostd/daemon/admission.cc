#include "hostd/daemon/admission.h"

#include <algorithm>
#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/units.h"

namespace slidedp::hostd {
namespace {

uint64_t AddSaturated(uint64_t a, uint64_t b) {
  uint64_t sum;
  return __builtin_add_overflow(a, b, &sum)
             ? std::numeric_limits<uint64_t>::max()
             : sum;
}

uint64_t Sum(const std::vector<policy::NamedBytes>& rows) {
  uint64_t sum = 0;
  for (const policy::NamedBytes& row : rows) sum = AddSaturated(sum, row.bytes);
  return sum;
}

uint64_t Minus(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

}  // namespace

uint64_t Demand::segment_bytes() const { return Sum(segments); }

uint64_t Demand::device_bytes() const {
  uint64_t all;
  return __builtin_mul_overflow(Sum(device), uint64_t(ranks), &all)
             ? std::numeric_limits<uint64_t>::max()
             : all;
}

Demand MakeDemand(const model::ModelConfig& config,
                  const model::StateLayout& layout, const policy::Plan& plan) {
  Demand demand;
  demand.segments = policy::HostSegments(layout, plan);
  demand.device = policy::DeviceBuffers(config, layout, plan);
  demand.ranks = plan.ranks;
  if (plan.device != policy::DeviceKind::kCpu) {
    std::erase_if(demand.device, [](const policy::NamedBytes& buffer) {
      return !absl::StartsWith(buffer.name, "pinned.");
    });
  }
  return demand;
}

std::string DemandTable(const Demand& demand) {
  std::string table;
  auto line = [&table](absl::string_view name, uint64_t bytes) {
    absl::StrAppendFormat(&table, "  %-28s %14s\n", name, FormatBytes(bytes));
  };
  for (const policy::NamedBytes& row : demand.segments) {
    line(absl::StrCat("host ", row.name), row.bytes);
  }
  for (const policy::NamedBytes& row : demand.device) {
    line(absl::StrCat("each of ", demand.ranks, " ranks ", row.name),
         row.bytes);
  }
  line("sum", AddSaturated(demand.segment_bytes(), demand.device_bytes()));
  return table;
}

absl::Status FitsEver(const Demand& demand, const HostMemory& host,
                      const MemoryLimits& limits) {
  uint64_t needed = AddSaturated(demand.segment_bytes(), demand.device_bytes());
  uint64_t usable = Minus(host.total_bytes, limits.headroom_bytes);
  std::string limit = absl::StrCat(host.total_limit, " less headroom_bytes ",
                                   FormatBytes(limits.headroom_bytes));
  if (limits.max_host_bytes != 0 && limits.max_host_bytes < usable) {
    usable = limits.max_host_bytes;
    limit = "max_host_bytes of slidedpd";
  }
  if (needed <= usable) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "the job can never fit this host: it needs ", FormatBytes(needed),
      ", the most that jobs may take is ", FormatBytes(usable), " (", limit,
      "); use a smaller model, fewer ranks or a shorter sequence\n",
      DemandTable(demand)));
}

std::optional<std::string> WhyNotNow(const Demand& demand,
                                     const HostMemory& host,
                                     const MemoryLimits& limits,
                                     const Promised& promised) {
  uint64_t needed = AddSaturated(demand.segment_bytes(), demand.device_bytes());
  uint64_t free = Minus(Minus(host.available_bytes, promised.pending_bytes),
                        limits.headroom_bytes);
  if (limits.max_host_bytes != 0) {
    free = std::min(free, Minus(limits.max_host_bytes, promised.all_bytes));
  }
  if (needed <= free) return std::nullopt;
  return absl::StrCat("waiting for memory: needs ", FormatBytes(needed), ", ",
                      FormatBytes(free), " free");
}

}  // namespace slidedp::hostd
