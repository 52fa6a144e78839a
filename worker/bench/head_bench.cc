#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/model/layout.h"
#include "policy/activations.h"
#include "worker/bench/commands.h"
#include "worker/bench/measure.h"
#include "worker/bench/op_list.h"
#include "worker/step/buffers.h"
#include "worker/step/head.h"

namespace slidedp::bench {
namespace {}  // namespace

absl::Status RunHead(const Options& given) {
  Options options = given;
  options.layers = 1;
  options.micro_batches = 1;
  SDP_ASSIGN_OR_RETURN(const model::ModelConfig config, ConfigOf(options));
  SDP_ASSIGN_OR_RETURN(const std::unique_ptr<Machine> machine,
                       Machine::Create(options.machine));
  SDP_ASSIGN_OR_RETURN(const policy::Plan plan,
                       PlanOf(options, config, *machine, 0));
  const model::StateLayout layout = model::MakeStateLayout(config);
  Machine& m = *machine;
  const int64_t t = plan.micro_batch_tokens(), h = config.hidden,
                v = config.vocab;

  std::vector<policy::NamedBytes> list =
      policy::DeviceBuffers(config, layout, plan);
  std::erase_if(list, [](const policy::NamedBytes& buffer) {
    return buffer.name != "head.logits" && buffer.name != "layer.d_norm" &&
           buffer.name != "layer.rstd" &&
           buffer.name != policy::ScratchName(policy::Segment::kInputNorm);
  });
  SDP_ASSIGN_OR_RETURN(const step::Buffers buffers,
                       step::Buffers::Allocate(m.device(), list));
  step::Head head(m.ops(), config, t, plan.head_chunk_tokens, buffers);
  SDP_ASSIGN_OR_RETURN(bf16 * table,
                       m.Weights("head.table", v * h, kWeightDeviation));
  SDP_ASSIGN_OR_RETURN(bf16 * norm, m.Weights("head.norm", h, 1));
  SDP_RETURN_IF_ERROR(m.FillOnes(norm, h));
  SDP_ASSIGN_OR_RETURN(void* d_table, m.Zeros("head.d_table", v * h * 4));
  SDP_ASSIGN_OR_RETURN(void* d_norm, m.Zeros("head.d_norm", h * 4));
  SDP_ASSIGN_OR_RETURN(void* input, m.Activations("head.input", t * h, 1));
  SDP_ASSIGN_OR_RETURN(void* d_input, m.Activations("head.d_input", t * h, 1));
  SDP_ASSIGN_OR_RETURN(void* loss, m.Zeros("head.loss", 8));
  std::vector<int32_t> ids(t);
  for (int64_t i = 0; i < t; ++i) ids[i] = static_cast<int32_t>(i * 7919 % v);
  SDP_ASSIGN_OR_RETURN(int32_t * labels, m.Integers("head.labels", ids));
  const step::Head::Weights weights = {norm, table, static_cast<float*>(d_norm),
                                       static_cast<float*>(d_table)};
  const float scale = 1.0f / static_cast<float>(t);
  const auto run = [&] {
    return head.Run(weights, input, labels, scale, static_cast<double*>(loss),
                    d_input, nullptr, m.stream());
  };

  // The ceiling: the products of a layer, and the head's own.
  const OpShape shape = {options.micro_batch_size, options.sequence,
                         plan.head_chunk_tokens};
  SDP_ASSIGN_OR_RETURN(std::vector<Op> products,
                       LayerProducts(m, config, shape));
  SDP_ASSIGN_OR_RETURN(std::vector<Op> others, OtherOps(m, config, shape));
  products.insert(products.end(), others.begin(), others.end());
  std::erase_if(products,
                [](const Op& op) { return op.kind != OpKind::kGemm; });
  SDP_RETURN_IF_ERROR(m.WarmUp([&]() -> absl::Status {
    for (const Op& op : products) SDP_RETURN_IF_ERROR(op.work());
    return run();
  }));
  SDP_ASSIGN_OR_RETURN(const std::vector<TimedOp> timed, TimeOps(m, products));
  SDP_ASSIGN_OR_RETURN(const double seconds, m.Seconds(run));

  const double flops = 6.0 * static_cast<double>(t) * static_cast<double>(h) *
                       static_cast<double>(v);
  const double tflops = flops / seconds * 1e-12;
  const double ceiling = BestGemmTflops(timed);
  // What exists for the head's sake: a chunk of logits and the workspace. Its
  // norms lie in the layers' scratch.
  uint64_t logits_bytes = 0, shared_bytes = 0;
  for (const policy::NamedBytes& buffer : list) {
    (buffer.name == "head.logits" ? logits_bytes : shared_bytes) +=
        buffer.bytes;
  }
  Result result;
  result.bench = absl::StrCat("loss-head-", v);
  result.value = tflops / ceiling;
  result.unit = "share of the best matrix product";
  result.target = TargetOf(result.bench);
  result.detail = DetailOf(options, config, m);
  result.detail["tokens"] = t;
  result.detail["chunk_tokens"] = plan.head_chunk_tokens;
  result.detail["seconds"] = seconds;
  result.detail["tflops"] = tflops;
  result.detail["best_gemm_tflops"] = ceiling;
  result.detail["logits_bytes"] = logits_bytes;
  result.detail["ops_workspace_bytes"] = m.workspace_bytes();
  result.detail["layer_scratch_bytes"] = shared_bytes;
  SDP_RETURN_IF_ERROR(Report(result, options.origin));
  result.bench += "-memory";
  result.value = static_cast<double>(logits_bytes + m.workspace_bytes()) / kGiB;
  result.unit = "GiB beside the layers' buffers";
  result.target = TargetOf(result.bench);
  return Report(result, options.origin);
}

}  // namespace slidedp::bench
