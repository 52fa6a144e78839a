// Forward passes over held-out sequences between two steps, through the same
// window and buffers: parameters of the version that the next step reads, no
// gradient, no word written. Units that stay in the window serve the next step.

#include "common/base/clock.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/shm/words.h"
#include "policy/eval_schedule.h"
#include "worker/step/trainer_impl.h"
#include "worker/step/unit_weights.h"

namespace slidedp::step {

using model::Role;

bool TrainerImpl::EvaluationIsDue(uint64_t step, uint64_t end) const {
  return in_.eval.dataset != nullptr &&
         policy::EvaluationIsDue(step, end, in_.eval.every_steps);
}

uint64_t TrainerImpl::EvaluationRounds() const {
  const auto places = static_cast<uint64_t>(
      in_.plan->ranks * in_.plan->micro_batches * in_.plan->micro_batch_size);
  return CeilDiv(in_.eval.sequences, places);
}

void TrainerImpl::AppendEvaluationVisits(uint64_t step) {
  for (int l = 0; l < in_.config->layers; ++l) {
    upcoming_.push_back({in_.layout->decoder_unit(l), step});
  }
  upcoming_.push_back({in_.layout->head_unit(), step});
}

absl::StatusOr<bool> TrainerImpl::Evaluate(uint64_t step) {
  // Harvest waits for the step before: its record need not wait for us.
  if (step > times_written_) SDP_RETURN_IF_ERROR(WriteTimes(step - 1));
  EvaluationPart part;
  part.step = step;
  const int64_t begin_ns = MonotonicNs();
  double* loss_sum = buffers_.get<double>("scalars") + step % 2;
  SDP_RETURN_IF_ERROR(
      in_.device->FillZero(loss_sum, sizeof(double), *compute_));
  times_->Pause(true);
  const uint64_t rounds = EvaluationRounds();
  AppendEvaluationVisits(step);
  for (uint64_t round = 0; round < rounds; ++round) {
    // Deliveries look ahead into the next round.
    if (round + 1 < rounds) AppendEvaluationVisits(step);
    data::FillEvalBatch(*in_.eval.dataset, in_.eval.sequences, in_.batch,
                        in_.rank, round, batch_);
    part.valid_tokens += batch_.valid_tokens;
    SDP_ASSIGN_OR_RETURN(StepTokens tokens, UploadTokens(step + round));
    tokens.loss_sum = loss_sum;
    SDP_RETURN_IF_ERROR(EvaluateRound(step, tokens));
  }
  times_->Pause(false);
  // Where tokens were uploaded from; the device has read them.
  auto* landed = buffers_.get<double>("pinned.tokens");
  SDP_RETURN_IF_ERROR(
      in_.device->Copy(landed, loss_sum, sizeof(double), *compute_));
  SDP_RETURN_IF_ERROR(in_.device->Synchronize(*compute_));
  part.loss_sum = *landed;
  part.seconds = static_cast<double>(MonotonicNs() - begin_ns) * 1e-9;
  return in_.eval.on_part(part);
}

absl::Status TrainerImpl::EvaluateRound(uint64_t step,
                                        const StepTokens& tokens) {
  decoder_->UseDocuments(tokens.first_rows, tokens.offsets);
  SDP_RETURN_IF_ERROR(Throttle());
  SDP_RETURN_IF_ERROR(activations_->Settle(*compute_));
  SDP_RETURN_IF_ERROR(
      in_.device->WaitWord(&shm::Versions(in_.versions->data())
                                .param_version(in_.layout->embedding_unit()),
                           step, *compute_));
  SDP_RETURN_IF_ERROR(ReadEmbedding(tokens));
  SDP_RETURN_IF_ERROR(CountVisit());
  for (int l = 0; l < in_.config->layers; ++l) {
    SDP_RETURN_IF_ERROR(ForwardLayer({in_.layout->decoder_unit(l), step}, l));
  }
  const Visit visit = {in_.layout->head_unit(), step};
  SDP_ASSIGN_OR_RETURN(const bf16* data, BeginVisit(visit, "head"));
  const UnitWeights weights(unit(visit.unit), data, nullptr);
  const Role table = in_.layout->tied() ? Role::kEmbedding : Role::kHead;
  const Head::Weights head = {weights.w(Role::kFinalNorm), weights.w(table),
                              nullptr, nullptr};
  const int64_t rows = in_.plan->micro_batch_tokens();
  for (int64_t mb = 0; mb < in_.plan->micro_batches; ++mb) {
    SDP_RETURN_IF_ERROR(head_->Run(head, Input(in_.config->layers, mb),
                                   tokens.labels + mb * rows, /*scale=*/0,
                                   tokens.loss_sum, /*d_input=*/nullptr,
                                   /*on_logits=*/{}, *compute_));
  }
  return EndVisit(visit);
}

}  // namespace slidedp::step
