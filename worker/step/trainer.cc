#include "worker/step/trainer.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/model/config.h"
#include "worker/step/trainer_impl.h"
#include "worker/step/unit_weights.h"

namespace slidedp::step {

using model::Role;

absl::Status TrainerImpl::Init() {
  const policy::Plan& plan = *in_.plan;
  const model::ModelConfig& config = *in_.config;
  if (in_.compute_only) {
    if (plan.ranks != 1 || plan.window_slots < config.layers) {
      return absl::InvalidArgumentError(
          absl::StrCat("compute only: needs 1 rank and ", config.layers,
                       " window slots; the plan has ", plan.ranks, " and ",
                       plan.window_slots));
    }
  } else {
    SDP_RETURN_IF_ERROR(RegisterSegments());
  }
  SDP_ASSIGN_OR_RETURN(
      buffers_, Buffers::Allocate(*in_.device, policy::DeviceBuffers(
                                                   config, *in_.layout, plan)));
  d_hidden_ = buffers_.get<void>("d_hidden");
  hidden_bytes_ =
      plan.micro_batch_tokens() * config.hidden * in_.ops->act_bytes();
  shm::Versions versions(nullptr);
  rows_ = policy::ReportedRows(*in_.layout);
  bottom_layer_ = in_.layout->lowest_trained_layer();
  const size_t buckets = policy::MakeGradBuckets(*in_.layout, plan).size();
  if (!in_.compute_only) {
    versions = shm::Versions(in_.versions->data());
    reports_ = shm::Reports(in_.reports->data(), buckets, rows_);
  }

  // Embedding, layers twice, head, embedding backward.
  const int64_t visits = 2 * config.layers + 3;
  const auto reductions = static_cast<int64_t>(buckets);
  const int64_t moves = Activations::Spans(config, plan);
  const int64_t chunks = Gradients::Waits(*in_.layout, plan, in_.rank);
  SDP_ASSIGN_OR_RETURN(
      LaneTimes times,
      LaneTimes::Create(*in_.device, {visits, visits, reductions, reductions,
                                      moves, 2 * visits, moves, chunks}));
  times_ = std::make_unique<LaneTimes>(std::move(times));
  times_->RecordInto(in_.recorder);
  SDP_ASSIGN_OR_RETURN(
      Window window,
      Window::Create({in_.device, in_.param_collective, in_.layout, in_.plan,
                      in_.rank, in_.params, versions, &buffers_, times_.get(),
                      in_.compute_only}));
  window_ = std::make_unique<Window>(std::move(window));
  SDP_ASSIGN_OR_RETURN(
      Gradients gradients,
      Gradients::Create({in_.device, in_.ops, in_.grad_collective, in_.layout,
                         in_.plan, in_.rank, in_.grads, versions, reports_,
                         &buffers_, times_.get(), in_.compute_only}));
  gradients_ = std::make_unique<Gradients>(std::move(gradients));
  SDP_ASSIGN_OR_RETURN(
      Activations activations,
      Activations::Create({in_.device, in_.config, in_.layout, in_.plan,
                           &buffers_, times_.get()}));
  activations_ = std::make_unique<Activations>(std::move(activations));
  decoder_ = std::make_unique<Decoder>(*in_.ops, config, plan,
                                       activations_.get(), buffers_);
  head_ = std::make_unique<Head>(*in_.ops, config, plan.micro_batch_tokens(),
                                 plan.head_chunk_tokens, buffers_);
  if (in_.mixture == nullptr && !in_.compute_only) {
    return absl::InvalidArgumentError("a job without a data set");
  }
  if (in_.mixture != nullptr) {
    SDP_RETURN_IF_ERROR(
        CheckDocuments("the data", in_.mixture->documents_per_sequence()));
  }
  if (in_.eval.dataset != nullptr) {
    SDP_RETURN_IF_ERROR(CheckDocuments(
        "the held-out data", in_.eval.dataset->documents_per_sequence()));
  }
  SDP_ASSIGN_OR_RETURN(compute_, in_.device->NewStream("compute"));
  for (auto& event : visit_done_) {
    SDP_ASSIGN_OR_RETURN(event, in_.device->NewEvent());
  }
  SDP_ASSIGN_OR_RETURN(embedded_, in_.device->NewEvent());
  if (hooks_.on_gradient || hooks_.on_logits) {
    uint64_t largest = plan.head_chunk_tokens * config.vocab;
    for (const model::Unit& unit : in_.layout->units) {
      largest = std::max(largest, unit.count);
    }
    SDP_ASSIGN_OR_RETURN(
        observer_, Observer::Create(*in_.device, largest * sizeof(float)));
  }
  const std::vector<float> frequencies = model::RopeInverseFrequencies(config);
  SDP_RETURN_IF_ERROR(
      in_.device->Copy(buffers_.get<void>("rope"), frequencies.data(),
                       frequencies.size() * sizeof(float), *compute_));
  SDP_RETURN_IF_ERROR(in_.device->Synchronize(*compute_));
  SDP_RETURN_IF_ERROR(PlaceWeights());
  return Warm();
}

absl::Status TrainerImpl::PlaceWeights() {
  const int embedding = in_.layout->embedding_unit();
  if (!in_.compute_only) {
    embedding_ = in_.params->at<bf16>(0) + unit(embedding).plane_offset;
    return absl::OkStatus();
  }
  bf16* table = nullptr;
  if (in_.layout->tied()) {
    table = window_->slot_data(embedding);
  } else {
    SDP_ASSIGN_OR_RETURN(
        resident_embedding_,
        in_.device->Allocate("embedding", unit(embedding).count * sizeof(bf16),
                             device::Memory::kDevice));
    table = resident_embedding_.as<bf16>();
  }
  embedding_ = table;
  if (!in_.fill_weights) return absl::OkStatus();
  for (int u = 0; u < static_cast<int>(in_.layout->units.size()); ++u) {
    SDP_RETURN_IF_ERROR(
        in_.fill_weights(u, u == embedding ? table : window_->slot_data(u)));
  }
  return absl::OkStatus();
}

absl::Status TrainerImpl::Run(uint64_t first, uint64_t count) {
  if (count == 0) return absl::OkStatus();
  const uint64_t end = first + count;
  times_written_ = first;
  upcoming_.clear();
  bool go_on = true;
  uint64_t step = first;
  for (; go_on && step <= end; ++step) {
    if (EvaluationIsDue(step, end)) {
      SDP_ASSIGN_OR_RETURN(go_on, Evaluate(step));
    }
    if (!go_on || step == end) break;
    SDP_RETURN_IF_ERROR(EnqueueStep(step));
    steps_enqueued_.store(step + 1, std::memory_order_relaxed);
  }
  SDP_RETURN_IF_ERROR(in_.device->Synchronize(*compute_));
  SDP_RETURN_IF_ERROR(gradients_->Synchronize());
  return step > times_written_ ? WriteTimes(step - 1) : absl::OkStatus();
}

absl::Status TrainerImpl::EnqueueStep(uint64_t step) {
  const int layers = static_cast<int>(in_.config->layers);
  // Deliveries look ahead within the step only: one of the next step would wait
  // for versions that depend on gradients not yet enqueued, and a full queue
  // would then block the host for ever.
  for (int l = 0; l < layers; ++l) {
    upcoming_.push_back({in_.layout->decoder_unit(l), step});
  }
  upcoming_.push_back({in_.layout->head_unit(), step});
  for (int l = layers - 1; l >= bottom_layer_; --l) {
    upcoming_.push_back({in_.layout->decoder_unit(l), step});
  }
  const std::vector<Visit> order = upcoming_;

  SDP_ASSIGN_OR_RETURN(const StepTokens tokens, BeginStep(step));
  decoder_->UseDocuments(tokens.first_rows, tokens.offsets);
  size_t at = 0;
  SDP_RETURN_IF_ERROR(Embed(step, tokens));
  for (int l = 0; l < layers; ++l) {
    SDP_RETURN_IF_ERROR(ForwardLayer(order[at++], l));
  }
  if (step > times_written_) {
    // That this step's embedding was usable shows that the last step is over.
    // Compute has long passed it, so this holds nothing up.
    SDP_RETURN_IF_ERROR(in_.device->Synchronize(*embedded_));
    SDP_RETURN_IF_ERROR(WriteTimes(step - 1));
  }
  SDP_RETURN_IF_ERROR(activations_->Turn(step, *compute_));
  SDP_RETURN_IF_ERROR(TurnAtHead(order[at++], tokens));
  for (int l = layers - 1; l >= bottom_layer_; --l) {
    SDP_RETURN_IF_ERROR(BackwardLayer(order[at++], l));
  }
  return EmbedBackward({in_.layout->embedding_unit(), step}, tokens);
}

absl::Status TrainerImpl::Throttle() {
  SDP_RETURN_IF_ERROR(
      in_.device->Synchronize(*visit_done_[visits_ % kVisitsAhead]));
  return window_->Advance(upcoming_);
}

absl::StatusOr<const bf16*> TrainerImpl::BeginVisit(const Visit& visit,
                                                    const char* work) {
  SDP_RETURN_IF_ERROR(Throttle());
  SDP_ASSIGN_OR_RETURN(const bf16* weights, window_->Use(visit, *compute_));
  SDP_RETURN_IF_ERROR(
      times_->Begin(Lane::kCompute, visit.step, {work, visit.unit}, *compute_));
  return weights;
}

absl::Status TrainerImpl::EndVisit(const Visit& visit) {
  SDP_RETURN_IF_ERROR(times_->End(Lane::kCompute, visit.step, *compute_));
  SDP_RETURN_IF_ERROR(window_->Release(visit, *compute_));
  upcoming_.erase(upcoming_.begin());
  return CountVisit();
}

absl::Status TrainerImpl::CountVisit() {
  return in_.device->Record(*visit_done_[visits_++ % kVisitsAhead], *compute_);
}

absl::Status TrainerImpl::Embed(uint64_t step, const StepTokens& tokens) {
  const int u = in_.layout->embedding_unit();
  SDP_RETURN_IF_ERROR(Throttle());
  SDP_RETURN_IF_ERROR(activations_->Settle(*compute_));
  if (!in_.compute_only) {
    SDP_RETURN_IF_ERROR(in_.device->WaitWord(
        &shm::Versions(in_.versions->data()).param_version(u), step,
        *compute_));
  }
  SDP_RETURN_IF_ERROR(
      times_->Begin(Lane::kCompute, step, {"embed", u}, *compute_));
  SDP_RETURN_IF_ERROR(ReadEmbedding(tokens));
  SDP_RETURN_IF_ERROR(times_->End(Lane::kCompute, step, *compute_));
  if (!in_.compute_only) {
    SDP_RETURN_IF_ERROR(in_.device->WriteWord(
        &reports_.step(in_.rank, step).embedded.value, step + 1, *compute_));
  }
  SDP_RETURN_IF_ERROR(in_.device->Record(*embedded_, *compute_));
  return CountVisit();
}

absl::Status TrainerImpl::ReadEmbedding(const StepTokens& tokens) {
  const UnitWeights weights(unit(in_.layout->embedding_unit()), embedding_,
                            nullptr);
  // The inputs of layer 0 lie one micro-batch after another.
  return in_.ops->EmbeddingForward(
      tokens.ids, weights.w(Role::kEmbedding),
      in_.plan->micro_batches * in_.plan->micro_batch_tokens(),
      in_.config->hidden, in_.config->vocab, Input(0, 0), *compute_);
}

absl::Status TrainerImpl::ForwardLayer(const Visit& visit, int64_t layer) {
  SDP_ASSIGN_OR_RETURN(const bf16* data, BeginVisit(visit, "forward"));
  const UnitWeights weights(unit(visit.unit), data, nullptr);
  for (int64_t mb = 0; mb < in_.plan->micro_batches; ++mb) {
    SDP_RETURN_IF_ERROR(activations_->Begin({layer, mb}, Pass::kForward,
                                            visit.step, *compute_));
    SDP_RETURN_IF_ERROR(decoder_->Forward(layer, mb, weights, Input(layer, mb),
                                          Input(layer + 1, mb), *compute_));
    SDP_RETURN_IF_ERROR(
        activations_->End({layer, mb}, Pass::kForward, visit.step, *compute_));
  }
  return EndVisit(visit);
}

absl::Status TrainerImpl::TurnAtHead(const Visit& visit,
                                     const StepTokens& tokens) {
  SDP_ASSIGN_OR_RETURN(const bf16* data, BeginVisit(visit, "head"));
  SDP_ASSIGN_OR_RETURN(float* gradient,
                       gradients_->Begin(visit.unit, *compute_));
  const UnitWeights weights(unit(visit.unit), data, gradient);
  const Role table = in_.layout->tied() ? Role::kEmbedding : Role::kHead;
  Head::Weights head = {weights.w(Role::kFinalNorm), weights.w(table),
                        weights.d(Role::kFinalNorm), weights.d(table)};
  const int64_t rows = in_.plan->micro_batch_tokens();
  for (int64_t mb = 0; mb < in_.plan->micro_batches; ++mb) {
    head.add_to_table = mb > 0;
    Head::OnLogits on_logits;
    if (hooks_.on_logits) {
      on_logits = [this, mb](int64_t first, int64_t count,
                             ops::ConstAct logits) {
        return observer_->Show(
            logits, in_.ops->activation_dtype() == ops::ActDType::kBf16,
            count * in_.config->vocab, *compute_,
            [this, mb, first, count](const float* values) {
              hooks_.on_logits(mb, first, count, values);
            });
      };
    }
    SDP_RETURN_IF_ERROR(head_->Run(
        head, Input(in_.config->layers, mb), tokens.labels + mb * rows,
        tokens.scale, tokens.loss_sum, DHidden(mb), on_logits, *compute_));
  }
  SDP_RETURN_IF_ERROR(
      gradients_->DrainLoss(tokens.loss_sum, visit.step, *compute_));
  SDP_RETURN_IF_ERROR(EndVisit(visit));
  if (in_.layout->tied()) {
    tied_gradient_ = gradient;  // complete after the embedding's own part
    return absl::OkStatus();
  }
  return FinishUnit(visit.unit, visit.step);
}

absl::Status TrainerImpl::BackwardLayer(const Visit& visit, int64_t layer) {
  SDP_ASSIGN_OR_RETURN(const bf16* data, BeginVisit(visit, "backward"));
  SDP_ASSIGN_OR_RETURN(float* gradient,
                       gradients_->Begin(visit.unit, *compute_));
  const UnitWeights weights(unit(visit.unit), data, gradient);
  for (int64_t mb = 0; mb < in_.plan->micro_batches; ++mb) {
    SDP_RETURN_IF_ERROR(activations_->Begin({layer, mb}, Pass::kBackward,
                                            visit.step, *compute_));
    const void* input =
        activations_->at({layer, mb}, policy::kInputPart, Pass::kBackward);
    // Who looks at whole gradients wants them as they were computed.
    const bool buckets =
        mb + 1 == in_.plan->micro_batches && hooks_.on_gradient == nullptr;
    SDP_RETURN_IF_ERROR(decoder_->Backward(
        layer, mb, weights, input, DHidden(mb),
        [&](Role role) {
          return buckets ? gradients_->Finish(
                               visit.unit, unit(visit.unit).tensor(role).offset,
                               visit.step, *compute_)
                         : absl::OkStatus();
        },
        *compute_));
    SDP_RETURN_IF_ERROR(
        activations_->End({layer, mb}, Pass::kBackward, visit.step, *compute_));
  }
  SDP_RETURN_IF_ERROR(EndVisit(visit));
  return FinishUnit(visit.unit, visit.step);
}

absl::Status TrainerImpl::EmbedBackward(const Visit& visit,
                                        const StepTokens& tokens) {
  float* gradient = tied_gradient_;
  if (!in_.layout->tied()) {
    SDP_ASSIGN_OR_RETURN(gradient, gradients_->Begin(visit.unit, *compute_));
  }
  const UnitWeights weights(unit(visit.unit), nullptr, gradient);
  if (weights.d(Role::kEmbedding) == nullptr) {
    return FinishUnit(visit.unit, visit.step);
  }
  SDP_RETURN_IF_ERROR(times_->Begin(Lane::kCompute, visit.step,
                                    {"embed backward", visit.unit}, *compute_));
  SDP_RETURN_IF_ERROR(in_.ops->EmbeddingBackward(
      tokens.ids, DHidden(0),
      in_.plan->micro_batches * in_.plan->micro_batch_tokens(),
      in_.config->hidden, in_.config->vocab, weights.d(Role::kEmbedding),
      *compute_));
  SDP_RETURN_IF_ERROR(times_->End(Lane::kCompute, visit.step, *compute_));
  return FinishUnit(visit.unit, visit.step);
}

absl::Status TrainerImpl::FinishUnit(int u, uint64_t step) {
  if (hooks_.on_gradient) {
    SDP_RETURN_IF_ERROR(observer_->Show(
        gradients_->accumulator(u), /*is_bf16=*/false, unit(u).count, *compute_,
        [this, u](const float* gradient) {
          hooks_.on_gradient(u, gradient, unit(u).count);
        }));
  }
  return gradients_->Finish(u, /*from=*/0, step, *compute_);
}

absl::Status TrainerImpl::WriteTimes(uint64_t step) {
  SDP_ASSIGN_OR_RETURN(const LaneTimes::Times times, times_->Harvest(step));
  times_written_ = step + 1;
  if (in_.compute_only) {
    compute_times_.push_back({times.busy_ns[static_cast<int>(Lane::kCompute)],
                              times.stall_ns, times.end_ns});
    return absl::OkStatus();
  }
  shm::StepReport& report = reports_.step(in_.rank, step);
  report.deliver_ns = times.busy_ns[static_cast<int>(Lane::kDeliver)];
  report.compute_ns = times.busy_ns[static_cast<int>(Lane::kCompute)];
  report.reduce_ns = times.busy_ns[static_cast<int>(Lane::kReduce)];
  report.drain_ns = times.busy_ns[static_cast<int>(Lane::kDrain)];
  report.offload_ns = times.busy_ns[static_cast<int>(Lane::kActivation)];
  report.offload_wait_ns =
      times.busy_ns[static_cast<int>(Lane::kActivationWait)];
  report.stall_ns = times.stall_ns;
  report.end_ns = times.end_ns;
  report.times_ready.value.store(step + 1, std::memory_order_release);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Create(
    const TrainerInputs& inputs, Hooks hooks) {
  auto trainer = std::make_unique<TrainerImpl>(inputs, std::move(hooks));
  SDP_RETURN_IF_ERROR(trainer->Init());
  return trainer;
}

}  // namespace slidedp::step
