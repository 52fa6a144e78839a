// The Trainer: trainer.cc creates it and walks the visits of a step,
// rehearsal.cc warms it up.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "common/shm/words.h"
#include "worker/step/activations.h"
#include "worker/step/buffers.h"
#include "worker/step/decoder.h"
#include "worker/step/gradients.h"
#include "worker/step/head.h"
#include "worker/step/lane_times.h"
#include "worker/step/observer.h"
#include "worker/step/trainer.h"
#include "worker/step/window.h"

namespace slidedp::step {

// How many visits the host may enqueue ahead of compute. Work is enqueued in
// dependency order, so waiting here for an earlier visit waits only for what is
// enqueued already, on every rank.
constexpr uint64_t kVisitsAhead = 4;

class TrainerImpl : public Trainer {
 public:
  TrainerImpl(const TrainerInputs& inputs, Hooks hooks)
      : in_(inputs), hooks_(std::move(hooks)) {}
  ~TrainerImpl() override {
    // Streams end before the buffers that their work uses.
    gradients_.reset();
    window_.reset();
    compute_.reset();
    activations_.reset();
  }

  absl::Status Init();
  absl::Status Run(uint64_t first, uint64_t count) override;
  uint64_t steps_enqueued() const override {
    return steps_enqueued_.load(std::memory_order_relaxed);
  }
  uint64_t device_bytes() const override {
    return buffers_.device_bytes() + resident_embedding_.bytes() +
           (in_.ops_workspace_bytes ? in_.ops_workspace_bytes() : 0);
  }
  const std::vector<ComputeTimes>& compute_times() const override {
    return compute_times_;
  }

 private:
  struct StepTokens {
    const int32_t* ids;
    const int32_t* labels;
    const int32_t *first_rows, *offsets;  // null: not packed
    float scale;
    double* loss_sum;
  };

  absl::Status Register(const shm::Mapping& mapping, bool read_only);
  absl::Status RegisterSegments();
  absl::Status PlaceWeights();
  absl::Status Warm();
  // What TrainerInputs::warm_up runs, and its parts.
  absl::Status Rehearse();
  absl::Status FillWithNoise();
  absl::Status RehearseLayers();
  absl::Status RehearseHead(const StepTokens& tokens);
  absl::Status Forget();
  // batch_, of the plan's size; every token is a label.
  void FillPseudoRandomBatch(uint64_t step);
  // Of batch_, if the plan is for packed documents: padding, which comes last,
  // may be of the document before it.
  void OneDocumentPerSequence();
  // Both take batch_; buffers of two turns alternate.
  absl::StatusOr<StepTokens> UploadBatch(uint64_t step);
  absl::StatusOr<StepTokens> UploadTokens(uint64_t turn);
  // That the plan has room for the documents of packed sequences.
  absl::Status CheckDocuments(const char* what, int64_t documents) const;
  absl::StatusOr<StepTokens> BeginStep(uint64_t step);
  void ReportUsedRows(uint64_t step);
  absl::Status EnqueueStep(uint64_t step);
  absl::Status Embed(uint64_t step, const StepTokens& tokens);
  absl::Status ReadEmbedding(const StepTokens& tokens);
  absl::Status ForwardLayer(const Visit& visit, int64_t layer);
  absl::Status TurnAtHead(const Visit& visit, const StepTokens& tokens);
  absl::Status BackwardLayer(const Visit& visit, int64_t layer);
  absl::Status EmbedBackward(const Visit& visit, const StepTokens& tokens);
  absl::Status FinishUnit(int unit, uint64_t step);
  // Holds the host back until compute is near, and begins deliveries.
  absl::Status Throttle();
  absl::Status CountVisit();
  // Throttles, and returns the unit's weights.
  absl::StatusOr<const bf16*> BeginVisit(const Visit& visit, const char* work);
  absl::Status EndVisit(const Visit& visit);
  absl::Status WriteTimes(uint64_t step);
  // In evaluation.cc. `end`: of this Run.
  bool EvaluationIsDue(uint64_t step, uint64_t end) const;
  uint64_t EvaluationRounds() const;
  void AppendEvaluationVisits(uint64_t step);
  // False: no further step.
  absl::StatusOr<bool> Evaluate(uint64_t step);
  absl::Status EvaluateRound(uint64_t step, const StepTokens& tokens);

  // In the forward pass. Those of layer 0 lie one micro-batch after another.
  void* Input(int64_t layer, int64_t micro_batch) const {
    return activations_->at({layer, micro_batch}, policy::kInputPart,
                            Pass::kForward);
  }
  void* DHidden(int64_t micro_batch) const {
    return static_cast<char*>(d_hidden_) + micro_batch * hidden_bytes_;
  }
  const model::Unit& unit(int u) const { return in_.layout->units[u]; }

  const TrainerInputs in_;
  const Hooks hooks_;
  Buffers buffers_;
  std::vector<std::unique_ptr<device::HostRegistration>> registrations_;
  std::unique_ptr<LaneTimes> times_;
  std::unique_ptr<Window> window_;
  std::unique_ptr<Gradients> gradients_;
  std::unique_ptr<Activations> activations_;
  std::unique_ptr<Decoder> decoder_;
  std::unique_ptr<Head> head_;
  std::unique_ptr<device::Stream> compute_;
  std::array<std::unique_ptr<device::Event>, kVisitsAhead> visit_done_;
  std::unique_ptr<device::Event> embedded_;
  std::optional<Observer> observer_;  // if there are hooks that look
  shm::Reports reports_{nullptr, 0, 0};
  uint64_t rows_ = 0;  // of the embedding table, as reported
  // The embedding unit: the host's plane, of which ops read the batch's rows
  // in place.
  const bf16* embedding_ = nullptr;
  device::Buffer resident_embedding_;  // compute_only, untied: instead of it
  int bottom_layer_ = 0;

  data::StepBatch batch_;
  void* d_hidden_ = nullptr;
  uint64_t hidden_bytes_ = 0;  // of one micro-batch
  float* tied_gradient_ = nullptr;

  std::vector<Visit> upcoming_;  // from the visit being enqueued on
  uint64_t visits_ = 0;          // enqueued so far
  uint64_t times_written_ = 0;   // steps whose times are reported
  std::atomic<uint64_t> steps_enqueued_{0};
  std::vector<ComputeTimes> compute_times_;
};

}  // namespace slidedp::step
