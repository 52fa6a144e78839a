#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/status.h"
#include "worker/bench/commands.h"
#include "worker/bench/measure.h"
#include "worker/bench/op_list.h"

namespace slidedp::bench {
namespace {

constexpr uint64_t kGpuCopyBytes = uint64_t{2} << 30;
constexpr uint64_t kCpuCopyBytes = uint64_t{64} << 20;

}  // namespace

absl::Status RunOps(const Options& options) {
  SDP_ASSIGN_OR_RETURN(const model::ModelConfig config, ConfigOf(options));
  SDP_ASSIGN_OR_RETURN(const std::unique_ptr<Machine> machine,
                       Machine::Create(options.machine));
  SDP_ASSIGN_OR_RETURN(const policy::Plan plan,
                       PlanOf(options, config, *machine, 0));
  const OpShape shape = {options.micro_batch_size, options.sequence,
                         plan.head_chunk_tokens};
  SDP_ASSIGN_OR_RETURN(std::vector<Op> ops,
                       LayerProducts(*machine, config, shape));
  SDP_ASSIGN_OR_RETURN(std::vector<Op> others,
                       OtherOps(*machine, config, shape));
  ops.insert(ops.end(), others.begin(), others.end());
  SDP_RETURN_IF_ERROR(machine->WarmUp([&]() -> absl::Status {
    for (const Op& op : ops) SDP_RETURN_IF_ERROR(op.work());
    return absl::OkStatus();
  }));
  SDP_ASSIGN_OR_RETURN(const std::vector<TimedOp> timed,
                       TimeOps(*machine, ops));
  SDP_ASSIGN_OR_RETURN(
      const double copy,
      CopyGigabytesPerSecond(
          *machine, machine->is_gpu() ? kGpuCopyBytes : kCpuCopyBytes));
  const double gemm = BestGemmTflops(timed);

  absl::PrintF(
      "%s, %s: %d tokens at sequence %d; best matrix product %.1f "
      "TFLOP/s, copy %.0f GB/s\n",
      machine->name(), options.model, shape.tokens(), shape.sequence, gemm,
      copy);
  absl::PrintF("%-28s %12s %10s %9s %7s\n", "op", "us", "TFLOP/s", "GB/s",
               "share");
  Json table = Json::array();
  for (const TimedOp& op : timed) {
    const bool computes = op.op->flops > 0;
    const double share =
        computes ? op.tflops() / gemm : op.gigabytes_per_second() / copy;
    absl::PrintF(
        "%-28s %12.1f %10s %9s %6.1f%%\n", op.op->name, op.seconds * 1e6,
        computes ? absl::StrFormat("%.1f", op.tflops()) : "",
        computes ? "" : absl::StrFormat("%.0f", op.gigabytes_per_second()),
        100 * share);
    Json row = {{"op", op.op->name}, {"seconds", op.seconds}};
    if (computes) {
      row["tflops"] = op.tflops();
    } else {
      row["gigabytes_per_second"] = op.gigabytes_per_second();
    }
    row["share"] = share;
    table.push_back(row);
  }
  Result result;
  result.bench = absl::StrCat("ops-", options.model);
  result.value = gemm;
  result.unit = "TFLOP/s of the best matrix product";
  result.target = TargetOf(result.bench);
  result.detail = DetailOf(options, config, *machine);
  result.detail["copy_gigabytes_per_second"] = copy;
  result.detail["ops"] = table;
  return Report(result, options.origin);
}

}  // namespace slidedp::bench
