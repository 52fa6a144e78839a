#include "hostd/ctl/estimate.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "hostd/ctl/data_summary.h"
#include "hostd/ctl/plan_file.h"
#include "hostd/ctl/table.h"
#include "policy/gpu_memory.h"
#include "policy/wire.h"

namespace slidedp::ctl {
namespace {

double PerParameter(uint64_t bytes, uint64_t parameters) {
  return parameters == 0
             ? 0
             : static_cast<double>(bytes) / static_cast<double>(parameters);
}

// Buffers of one group ("window.decoder.0" and the like) as one line.
std::vector<policy::NamedBytes> Grouped(
    const std::vector<policy::NamedBytes>& parts) {
  std::vector<policy::NamedBytes> groups;
  for (const policy::NamedBytes& part : parts) {
    std::string group = part.name.substr(0, part.name.find('.'));
    auto found = std::find_if(
        groups.begin(), groups.end(),
        [&](const policy::NamedBytes& g) { return g.name == group; });
    if (found == groups.end()) {
      groups.push_back({group, part.bytes});
    } else {
      found->bytes += part.bytes;
    }
  }
  return groups;
}

void PrintBytes(const std::string& title,
                const std::vector<policy::NamedBytes>& parts,
                uint64_t parameters, bool headers, bool color,
                std::ostream& out) {
  Table table({{title},
               {"BYTES", Align::kRight},
               {"SIZE", Align::kRight},
               {"B/PARAM", Align::kRight}});
  auto add = [&](const std::string& name, uint64_t bytes, const char* sgr) {
    table.Add(
        {{name, sgr},
         {absl::StrCat(bytes), sgr},
         {FormatBytes(bytes), sgr},
         {absl::StrFormat("%.3f", PerParameter(bytes, parameters)), sgr}});
  };
  for (const policy::NamedBytes& part : parts) add(part.name, part.bytes, "");
  add("total", PlannedBytes::Total(parts), "1");
  table.Print(headers, color, out);
}

}  // namespace

absl::StatusOr<Estimate> MakeEstimate(const std::string& model_folder,
                                      v1::JobSpec spec, int logical_cpus,
                                      uint64_t gpu_memory_bytes) {
  Estimate estimate;
  estimate.model = model_folder;
  SDP_ASSIGN_OR_RETURN(ModelFacts facts, ReadModelFacts(model_folder));
  SDP_RETURN_IF_ERROR(ResolveSequenceLength(facts, model_folder, spec));
  SDP_RETURN_IF_ERROR(ApplyPlanFile(facts.config.layers, spec));
  if (!spec.sources().empty()) {
    SDP_RETURN_IF_ERROR(ResolveData(facts, "estimate", spec).status());
  }
  absl::StatusOr<PlannedBytes> bytes =
      PlanBytes(spec, facts, logical_cpus, gpu_memory_bytes);
  if (!bytes.ok()) return Annotate(bytes.status(), "estimate");
  estimate.bytes = *std::move(bytes);
  estimate.parameters = facts.layout.parameters;
  estimate.spec = std::move(spec);
  return estimate;
}

Json JsonEstimate(const Estimate& estimate) {
  uint64_t host = PlannedBytes::Total(estimate.bytes.host);
  uint64_t device = PlannedBytes::Total(estimate.bytes.device);
  Json json = JsonDocument();
  json["model"] = estimate.model;
  json["parameters"] = estimate.parameters;
  json["plan"] = JsonPlan(policy::ToWire(estimate.bytes.plan));
  json["host_segments"] = JsonBytes(estimate.bytes.host);
  json["host_bytes"] = host;
  json["device_buffers_per_rank"] = JsonBytes(estimate.bytes.device);
  json["device_bytes_per_rank"] = device;
  // CPU ranks' "device" memory is the host's too.
  bool on_host = estimate.bytes.plan.device == policy::DeviceKind::kCpu;
  json["host_bytes_with_cpu_ranks"] =
      host + (on_host ? device * estimate.bytes.plan.ranks : 0);
  json["host_bytes_per_parameter"] = PerParameter(host, estimate.parameters);
  json["device_bytes_per_rank_per_parameter"] =
      PerParameter(device, estimate.parameters);
  if (!on_host) {
    json["pinned_bytes_per_rank"] =
        device - policy::GpuBytes(estimate.bytes.device);
    json["gpu_memory_bytes"] = estimate.bytes.gpu_memory_bytes;
    json["gpu_allowance"] = JsonBytes(estimate.bytes.gpu_allowance);
  }
  if (!estimate.spec.sources().empty()) {
    json["data"] = JsonData(estimate.spec);
  }
  return json;
}

void PrintEstimate(const Estimate& estimate, bool headers, bool wide,
                   bool color, std::ostream& out) {
  const policy::Plan& plan = estimate.bytes.plan;
  bool on_host = plan.device == policy::DeviceKind::kCpu;
  auto text = [](absl::string_view name) { return std::string(name); };
  out << "model    " << estimate.model << ", " << estimate.parameters
      << " parameters\n"
      << "plan     " << plan.ranks << (plan.ranks == 1 ? " rank" : " ranks")
      << " (" << (on_host ? "cpu" : "cuda") << "), "
      << text(policy::Name(plan.update_mode)) << ", sequences of "
      << plan.sequence_length << ", micro-batches " << plan.micro_batches
      << " x " << plan.micro_batch_size << " a rank, routes "
      << text(policy::Name(plan.decoder.params)) << "/"
      << text(policy::Name(plan.decoder.grads)) << "/"
      << text(policy::Name(plan.decoder.reduce)) << "\n";
  if (!estimate.spec.sources().empty()) PrintData(estimate.spec, out);
  out << "\n";
  PrintBytes("HOST SEGMENT", estimate.bytes.host, estimate.parameters, headers,
             color, out);
  out << "\n";
  PrintBytes("DEVICE, EACH RANK",
             wide ? estimate.bytes.device : Grouped(estimate.bytes.device),
             estimate.parameters, headers, color, out);
  if (on_host) {
    uint64_t all = PlannedBytes::Total(estimate.bytes.host) +
                   PlannedBytes::Total(estimate.bytes.device) * plan.ranks;
    out << "\nThe device of a CPU rank is host memory: " << FormatBytes(all)
        << " (" << all << " bytes) in all.\n";
    return;
  }
  out << "\n";
  PrintBytes("SET ASIDE, EACH GPU", estimate.bytes.gpu_allowance,
             estimate.parameters, headers, color, out);
  const uint64_t pinned = PlannedBytes::Total(estimate.bytes.device) -
                          policy::GpuBytes(estimate.bytes.device);
  const uint64_t on_hosts =
      PlannedBytes::Total(estimate.bytes.host) + pinned * plan.ranks;
  out << "\nPinned buffers are host memory: " << FormatBytes(on_hosts) << " ("
      << on_hosts << " bytes) of it in all.\nEach GPU has "
      << FormatBytes(estimate.bytes.gpu_memory_bytes)
      << (plan.gpu_memory_limit_bytes == 0
              ? std::string()
              : absl::StrCat(", the job may use ",
                             FormatBytes(plan.gpu_memory_limit_bytes)))
      << ".\n";
}

}  // namespace slidedp::ctl
