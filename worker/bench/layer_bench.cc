#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/status.h"
#include "common/model/layout.h"
#include "worker/bench/commands.h"
#include "worker/bench/measure.h"
#include "worker/bench/op_list.h"
#include "worker/step/activations.h"
#include "worker/step/buffers.h"
#include "worker/step/decoder.h"

namespace slidedp::bench {
namespace {

// One layer with weights, gradients, input and output.
class BenchLayer {
 public:
  static absl::StatusOr<std::unique_ptr<BenchLayer>> Create(
      Machine& machine, const model::ModelConfig& config,
      const policy::Plan& plan) {
    std::unique_ptr<BenchLayer> layer(new BenchLayer(machine, config, plan));
    SDP_RETURN_IF_ERROR(layer->Init());
    return layer;
  }

  absl::Status Forward() {
    return decoder_->Forward(0, 0, Weights(), input_, output_,
                             machine_.stream());
  }
  // The gradient it leaves is the next call's, and grows with each.
  absl::Status Backward() {
    return decoder_->Backward(0, 0, Weights(), input_, d_hidden_,
                              step::Decoder::Ignore, machine_.stream());
  }
  absl::StatusOr<double> BackwardSeconds() {
    constexpr int kMaxRepeats = 16;
    return machine_.Seconds(
        [this] { return Backward(); },
        [this]() -> absl::Status {
          SDP_RETURN_IF_ERROR(machine_.FillNormal(
              d_hidden_, plan_.micro_batch_tokens() * config_.hidden,
              machine_.ops().activation_dtype() == ops::ActDType::kBf16,
              kGradientDeviation));
          return Forward();
        },
        kMaxRepeats);
  }

 private:
  BenchLayer(Machine& machine, const model::ModelConfig& config,
             const policy::Plan& plan)
      : machine_(machine),
        config_(config),
        plan_(plan),
        layout_(model::MakeStateLayout(config)) {}

  const model::Unit& unit() const {
    return layout_.units[layout_.decoder_unit(0)];
  }
  step::UnitWeights Weights() const {
    return step::UnitWeights(unit(), weights_, gradients_);
  }

  absl::Status Init() {
    Machine& m = machine_;
    SDP_ASSIGN_OR_RETURN(
        weights_, m.Weights("layer.weights", unit().count, kWeightDeviation));
    for (const model::Tensor& tensor : unit().tensors) {
      if (tensor.decay) continue;
      SDP_RETURN_IF_ERROR(m.FillOnes(weights_ + tensor.offset, tensor.count));
    }
    SDP_ASSIGN_OR_RETURN(void* gradients,
                         m.Zeros("layer.gradients", unit().count * 4));
    gradients_ = static_cast<float*>(gradients);
    const int64_t n = plan_.micro_batch_tokens() * config_.hidden;
    SDP_ASSIGN_OR_RETURN(input_, m.Activations("layer.input", n, 1));
    SDP_ASSIGN_OR_RETURN(output_, m.Activations("layer.output", n, 1));
    SDP_ASSIGN_OR_RETURN(
        d_hidden_, m.Activations("layer.d_hidden", n, kGradientDeviation));
    std::vector<policy::NamedBytes> list =
        policy::DeviceBuffers(config_, layout_, plan_);
    std::erase_if(list, [](const policy::NamedBytes& buffer) {
      return !absl::StartsWith(buffer.name, "layer.") &&
             !absl::StartsWith(buffer.name, "kept.") && buffer.name != "rope";
    });
    SDP_ASSIGN_OR_RETURN(buffers_, step::Buffers::Allocate(m.device(), list));
    const std::vector<float> frequencies =
        model::RopeInverseFrequencies(config_);
    SDP_RETURN_IF_ERROR(
        m.device().Copy(buffers_.get<void>("rope"), frequencies.data(),
                        frequencies.size() * sizeof(float), m.stream()));
    SDP_RETURN_IF_ERROR(m.device().Synchronize(m.stream()));
    SDP_ASSIGN_OR_RETURN(
        step::Activations activations,
        step::Activations::Create(
            {&m.device(), &config_, &layout_, &plan_, &buffers_, nullptr}));
    activations_ = std::make_unique<step::Activations>(std::move(activations));
    decoder_ = std::make_unique<step::Decoder>(m.ops(), config_, plan_,
                                               activations_.get(), buffers_);
    return absl::OkStatus();
  }

  Machine& machine_;
  const model::ModelConfig& config_;
  const policy::Plan plan_;
  const model::StateLayout layout_;
  bf16* weights_ = nullptr;
  float* gradients_ = nullptr;
  void *input_ = nullptr, *output_ = nullptr, *d_hidden_ = nullptr;
  step::Buffers buffers_;
  std::unique_ptr<step::Activations> activations_;
  std::unique_ptr<step::Decoder> decoder_;
};

}  // namespace

absl::Status RunLayer(const Options& given) {
  Options options = given;
  options.layers = 1;
  options.micro_batches = 1;
  SDP_ASSIGN_OR_RETURN(const model::ModelConfig config, ConfigOf(options));
  SDP_ASSIGN_OR_RETURN(const std::unique_ptr<Machine> machine,
                       Machine::Create(options.machine));
  SDP_ASSIGN_OR_RETURN(const policy::Plan keeping,
                       PlanOf(options, config, *machine, 1));
  SDP_ASSIGN_OR_RETURN(const policy::Plan recomputing,
                       PlanOf(options, config, *machine, 0));
  const OpShape shape = {options.micro_batch_size, options.sequence, 1};
  SDP_ASSIGN_OR_RETURN(const std::vector<Op> products,
                       LayerProducts(*machine, config, shape));
  SDP_ASSIGN_OR_RETURN(const std::unique_ptr<BenchLayer> kept,
                       BenchLayer::Create(*machine, config, keeping));
  SDP_ASSIGN_OR_RETURN(const std::unique_ptr<BenchLayer> recomputed,
                       BenchLayer::Create(*machine, config, recomputing));
  SDP_RETURN_IF_ERROR(machine->WarmUp([&]() -> absl::Status {
    for (const Op& op : products) SDP_RETURN_IF_ERROR(op.work());
    for (BenchLayer* layer : {kept.get(), recomputed.get()}) {
      SDP_RETURN_IF_ERROR(layer->Forward());
      SDP_RETURN_IF_ERROR(layer->Backward());
    }
    return absl::OkStatus();
  }));

  // Before and after the layer, because a GPU's clock drifts with its heat.
  SDP_ASSIGN_OR_RETURN(const std::vector<TimedOp> before,
                       TimeOps(*machine, products));
  SDP_ASSIGN_OR_RETURN(const double forward,
                       machine->Seconds([&] { return kept->Forward(); }));
  SDP_ASSIGN_OR_RETURN(const double backward, kept->BackwardSeconds());
  SDP_ASSIGN_OR_RETURN(const double backward_recomputing,
                       recomputed->BackwardSeconds());
  SDP_ASSIGN_OR_RETURN(const std::vector<TimedOp> after,
                       TimeOps(*machine, products));

  double alone_forward = 0, alone_backward = 0;
  Json parts = Json::object();
  for (size_t i = 0; i < before.size(); ++i) {
    const double seconds = (before[i].seconds + after[i].seconds) / 2;
    (before[i].op->layer_forward ? alone_forward : alone_backward) += seconds;
    parts[before[i].op->name] = seconds;
  }
  Result result;
  result.bench = absl::StrCat("layer-", options.model);
  result.value = (forward + backward) / (alone_forward + alone_backward);
  result.unit = "layer / (matrix products and attention alone)";
  result.target = TargetOf(result.bench);
  result.detail = DetailOf(options, config, *machine);
  result.detail["forward_seconds"] = forward;
  result.detail["backward_seconds"] = backward;
  result.detail["backward_recomputing_seconds"] = backward_recomputing;
  result.detail["alone_forward_seconds"] = alone_forward;
  result.detail["alone_backward_seconds"] = alone_backward;
  result.detail["alone_seconds"] = parts;
  absl::PrintF(
      "forward %.3f ms (alone %.3f), backward %.3f ms (alone %.3f), "
      "backward with recomputation %.3f ms\n",
      forward * 1e3, alone_forward * 1e3, backward * 1e3, alone_backward * 1e3,
      backward_recomputing * 1e3);
  return Report(result, options.origin);
}

}  // namespace slidedp::bench
