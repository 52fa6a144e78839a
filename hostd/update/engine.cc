// The coordinator: decides, step by step, what the update workers may do.
#include "hostd/update/engine.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "common/base/backoff.h"
#include "common/base/check.h"
#include "common/base/clock.h"
#include "common/base/status.h"
#include "hostd/update/adamw.h"
#include "hostd/update/arrivals.h"
#include "hostd/update/rank_reports.h"
#include "hostd/update/step_norms.h"
#include "hostd/update/step_work.h"
#include "hostd/update/workers.h"

namespace slidedp::hostd {
namespace {

// Sleeps between polls double up to 50 us; during a forward pass, once nothing
// has arrived for some 5 ms, to 0.5 ms, which is then a small part of the wait.
constexpr int64_t kFirstSleepNs = 2'000, kLongestSleepNs = 50'000;
constexpr int64_t kLongestIdleSleepNs = 500'000;
constexpr int kPollsUntilIdle = 100;

class Engine final : public UpdateEngine {
 public:
  Engine(HostState& state, const UpdateConfig& config, OnStep on_step,
         OnFailure on_failure, OnBoundary on_boundary)
      : config_(config),
        layout_(state.layout()),
        mode_(state.plan().update_mode),
        eager_(mode_ == policy::UpdateMode::kEager),
        work_(MakeStepWork(layout_, state.plan(), state.grad_schedule(),
                           config.slice_elements)),
        reports_(state.reports(), state.plan().ranks,
                 policy::ReportedRows(layout_)),
        arrivals_(state, work_, reports_, config.first_step),
        workers_(std::make_unique<UpdateWorkers>(
            state, work_, config.threads, config.first_step, config.recorder)),
        norms_(layout_, work_, reports_, *workers_, eager_,
               config.max_grad_norm),
        on_step_(std::move(on_step)),
        on_failure_(std::move(on_failure)),
        on_boundary_(std::move(on_boundary)),
        updates_applied_(config.updates_applied),
        clip_history_(config.clip_history),
        steps_done_(config.first_step) {
    coordinator_ = std::thread([this] { Coordinate(); });
  }
  ~Engine() override { Stop(); }

  void Stop() override;
  uint64_t steps_done() const override { return steps_done_; }
  void Release(int unit) override { workers_->Release(unit); }

 private:
  // A step under way.
  struct Step {
    uint64_t index = 0;
    uint64_t valid_tokens = 0;
    int64_t begin_ns = 0;  // as seen here
    double lr = 0;
    // The table's other rows are under way, wait for the decision, or are none.
    bool rows_begun = false;
    bool rows_late = false;    // they wait
    std::vector<int> waiting;  // complete pieces of closed buckets
    double grad_norm = 0, clip_coefficient = 1;
    std::string skip_reason;
  };

  void Coordinate();
  absl::Status RunStep(uint64_t index);
  // Moves on what came since the last call.
  absl::Status Advance();
  absl::Status Decide();
  // Calls `poll` until it returns true, sleeping between calls. Cancelled if
  // the engine is to stop.
  absl::Status Await(absl::FunctionRef<absl::StatusOr<bool>()> poll);
  absl::Status AwaitPublication();

  absl::Status ReadBegin();  // once the ranks have begun the step
  absl::Status BeginRows();
  absl::Status UpdateOtherRows();
  absl::Status ReadLosses();
  bool Predicts() const;  // that the step will not be clipped
  AdamWStep EarlyAdamW() const;
  void PollSoon();  // something arrived, and more may follow
  void Complete();
  void AtBoundary();
  // The result waits for the ranks' times, but not beyond the next step's
  // completion: `now`.
  void EmitPending(bool now);

  const UpdateConfig config_;
  const model::StateLayout& layout_;
  const policy::UpdateMode mode_;
  const bool eager_;
  const StepWork work_;
  const RankReports reports_;

  // The coordinator's.
  Arrivals arrivals_;
  std::unique_ptr<UpdateWorkers> workers_;
  StepNorms norms_;
  const OnStep on_step_;
  const OnFailure on_failure_;
  const OnBoundary on_boundary_;
  Step step_;
  uint64_t updates_applied_;
  uint64_t clip_history_;
  std::optional<StepResult> pending_;
  int64_t sleep_ns_ = kFirstSleepNs;
  int quiet_polls_ = 0;  // since something arrived

  std::atomic<uint64_t> steps_done_;
  std::atomic<bool> stop_ = false;
  std::mutex stop_mutex_;
  std::thread coordinator_;  // joined under stop_mutex_
};

void Engine::Stop() {
  std::lock_guard lock(stop_mutex_);
  if (!coordinator_.joinable()) return;
  SDP_CHECK(std::this_thread::get_id() != coordinator_.get_id(),
            "Stop() inside a callback");
  stop_ = true;
  workers_->Wake();
  coordinator_.join();
  workers_.reset();
}

void Engine::Coordinate() {
  UseFineTimerSlack();
  absl::Status status;
  for (uint64_t step = config_.first_step;
       status.ok() && step < config_.schedule.total_steps; ++step) {
    status = RunStep(step);
  }
  if (status.ok()) status = Await([&] { return !pending_.has_value(); });
  workers_->Halt();
  EmitPending(true);
  if (!status.ok() && !absl::IsCancelled(status)) on_failure_(status);
}

absl::Status Engine::Await(absl::FunctionRef<absl::StatusOr<bool>()> poll) {
  Progress progress = workers_->progress();
  while (true) {
    if (stop_) return absl::CancelledError("the engine stops");
    SDP_RETURN_IF_ERROR(progress.failure);
    EmitPending(false);
    SDP_ASSIGN_OR_RETURN(const bool done, poll());
    if (done) return absl::OkStatus();
    progress = workers_->Wait(sleep_ns_);
    const bool idle = ++quiet_polls_ >= kPollsUntilIdle && !norms_.has_losses();
    sleep_ns_ =
        std::min(2 * sleep_ns_, idle ? kLongestIdleSleepNs : kLongestSleepNs);
  }
}

absl::Status Engine::AwaitPublication() {
  return Await([&] {
    return workers_->progress().units_published ==
           static_cast<int>(layout_.units.size());
  });
}

absl::Status Engine::RunStep(uint64_t index) {
  step_ = Step();
  step_.index = index;
  step_.lr = config_.lr * policy::LrFactor(config_.schedule, index);
  norms_.BeginStep(index);
  workers_->BeginStep(index, EarlyAdamW());
  arrivals_.BeginStep(index);
  SDP_RETURN_IF_ERROR(Await([&]() -> absl::StatusOr<bool> {
    SDP_ASSIGN_OR_RETURN(const std::optional<uint64_t> tokens,
                         reports_.ValidTokens(index));
    if (!tokens.has_value()) return false;
    step_.valid_tokens = *tokens;
    return true;
  }));
  SDP_RETURN_IF_ERROR(ReadBegin());
  const bool at_once = eager_ || step_.valid_tokens == 0;
  SDP_RETURN_IF_ERROR(Await([&]() -> absl::StatusOr<bool> {
    SDP_RETURN_IF_ERROR(Advance());
    if (!norms_.has_losses() || !arrivals_.all_arrived()) return false;
    return at_once ? workers_->progress().units_published ==
                         static_cast<int>(layout_.units.size())
                   : norms_.all_known();
  }));
  if (!at_once) {
    SDP_RETURN_IF_ERROR(Decide());
  } else if (step_.valid_tokens > 0) {
    step_.grad_norm = norms_.TotalNorm();
  }
  // A step that changes nothing ends while units are still being saved; the
  // next boundary may hold them only when they have been.
  SDP_RETURN_IF_ERROR(Await([this] { return !workers_->holds_units(); }));
  Complete();
  return absl::OkStatus();
}

absl::Status Engine::ReadBegin() {
  step_.begin_ns = MonotonicNs();
  PollSoon();
  if (step_.valid_tokens == 0) {
    step_.skip_reason = "no valid tokens";
    step_.rows_begun = true;
    return absl::OkStatus();
  }
  // Where an update can't be undone, nothing is done that may have to be.
  if (!eager_ && !CanUndo(EarlyAdamW())) {
    step_.rows_begun = step_.rows_late = true;
  } else if (mode_ == policy::UpdateMode::kSpeculative && Predicts()) {
    norms_.Speculate();
  }
  return absl::OkStatus();
}

absl::Status Engine::Advance() {
  SDP_RETURN_IF_ERROR(arrivals_.Poll());
  SDP_RETURN_IF_ERROR(BeginRows());
  SDP_RETURN_IF_ERROR(ReadLosses());
  for (int bucket : arrivals_.TakeStartedBuckets()) {
    SDP_RETURN_IF_ERROR(norms_.Read(bucket));
  }
  const std::vector<int> complete = arrivals_.TakeCompletePieces();
  if (!complete.empty()) PollSoon();
  if (step_.valid_tokens == 0) {
    workers_->Skip(complete);
    return absl::OkStatus();
  }
  if (!eager_) {
    std::vector<int> sums;
    for (int piece : complete) {
      if (work_.units[work_.pieces[piece].unit].host_sums) {
        sums.push_back(piece);
      }
    }
    workers_->Sum(sums);
  }
  step_.waiting.insert(step_.waiting.end(), complete.begin(), complete.end());
  if (!norms_.has_losses()) return absl::OkStatus();
  norms_.OpenBuckets();
  std::vector<int> open, closed;
  for (int piece : step_.waiting) {
    const Gate gate = norms_.gate(work_.pieces[piece].bucket);
    if (gate == Gate::kAfterDecision) continue;
    (gate == Gate::kOpen ? open : closed).push_back(piece);
  }
  workers_->Update(open);
  step_.waiting = std::move(closed);
  return absl::OkStatus();
}

absl::Status Engine::Decide() {
  step_.grad_norm = norms_.TotalNorm();
  step_.skip_reason = norms_.SkipReason(step_.grad_norm);
  if (!step_.skip_reason.empty()) {
    workers_->Decide(std::nullopt);
  } else {
    step_.clip_coefficient = norms_.ClipCoefficient(step_.grad_norm);
    if (step_.rows_late) SDP_RETURN_IF_ERROR(UpdateOtherRows());
    workers_->Decide(static_cast<float>(step_.clip_coefficient));
  }
  return AwaitPublication();
}

absl::Status Engine::BeginRows() {
  if (step_.rows_begun) return absl::OkStatus();
  SDP_ASSIGN_OR_RETURN(const bool embedded, reports_.Embedded(step_.index));
  if (!embedded) return absl::OkStatus();
  step_.rows_begun = true;
  return UpdateOtherRows();
}

absl::Status Engine::UpdateOtherRows() {
  SDP_ASSIGN_OR_RETURN(std::vector<uint64_t> used,
                       reports_.UsedRows(step_.index));
  if (!used.empty()) workers_->UpdateOtherRows(std::move(used));
  return absl::OkStatus();
}

absl::Status Engine::ReadLosses() {
  SDP_ASSIGN_OR_RETURN(const bool came,
                       norms_.ReadLosses(step_.valid_tokens > 0));
  if (!came) return absl::OkStatus();
  PollSoon();
  if (eager_ || step_.valid_tokens == 0) workers_->PublishFrozen();
  // In a rank's order, its reads of the embedding unit are over before.
  SDP_RETURN_IF_ERROR(BeginRows());
  if (step_.rows_begun) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("step report of step ", step_.index,
                   ": every rank's loss is there, but not every rank's "
                   "embedded"));
}

bool Engine::Predicts() const {
  const uint64_t last = clip_history_ & ((uint64_t{1} << kPredictorSteps) - 1);
  return std::popcount(last) < config_.clipped_to_defer;
}

void Engine::PollSoon() {
  sleep_ns_ = kFirstSleepNs;
  quiet_polls_ = 0;
}

AdamWStep Engine::EarlyAdamW() const {
  return MakeAdamWStep(step_.lr, config_.beta1, config_.beta2, config_.eps,
                       config_.weight_decay, updates_applied_ + 1, 1);
}

void Engine::Complete() {
  EmitPending(true);
  const bool skipped = !step_.skip_reason.empty();
  updates_applied_ += !skipped;
  if (!eager_ && step_.valid_tokens > 0) {
    clip_history_ =
        clip_history_ << 1 | (skipped || step_.clip_coefficient < 1);
  }
  const Progress progress = workers_->progress();
  StepResult result = {};
  result.step = step_.index;
  result.loss =
      step_.valid_tokens > 0
          ? norms_.loss_sum() / static_cast<double>(step_.valid_tokens)
          : std::nan("");
  result.grad_norm = step_.grad_norm;
  result.clip_coefficient = step_.clip_coefficient;
  result.lr = step_.lr;
  result.valid_tokens = step_.valid_tokens;
  result.speculated = norms_.speculated();
  result.clip_history = clip_history_;
  result.skipped = skipped;
  result.skip_reason = step_.skip_reason;
  result.not_finite = skipped && step_.valid_tokens > 0;
  result.begin_ns = step_.begin_ns;
  result.end_ns = progress.published_ns;
  result.update_ns = progress.busiest_ns;
  pending_ = std::move(result);
  steps_done_ = step_.index + 1;
  AtBoundary();
  EmitPending(false);
}

void Engine::AtBoundary() {
  if (!on_boundary_) return;
  // Held first: what the call starts may release at once.
  workers_->HoldUnits();
  if (on_boundary_({step_.index + 1, updates_applied_, clip_history_})) return;
  for (size_t u = 0; u < layout_.units.size(); ++u) {
    workers_->Release(static_cast<int>(u));
  }
}

void Engine::EmitPending(bool now) {
  if (!pending_.has_value()) return;
  const StepTimes times = reports_.Times(pending_->step);
  if (!times.complete && !now) return;
  StepResult result = *std::exchange(pending_, std::nullopt);
  if (times.begin_ns != 0) result.begin_ns = times.begin_ns;
  result.deliver_ns = times.deliver_ns;
  result.compute_ns = times.compute_ns;
  result.reduce_ns = times.reduce_ns;
  result.drain_ns = times.drain_ns;
  result.stall_ns = times.stall_ns;
  result.offload_ns = times.offload_ns;
  result.offload_wait_ns = times.offload_wait_ns;
  on_step_(result);
}

}  // namespace

std::unique_ptr<UpdateEngine> UpdateEngine::Start(HostState& state,
                                                  const UpdateConfig& config,
                                                  OnStep on_step,
                                                  OnFailure on_failure,
                                                  OnBoundary on_boundary) {
  SDP_CHECK(config.threads >= 1, "no update threads");
  return std::make_unique<Engine>(state, config, std::move(on_step),
                                  std::move(on_failure),
                                  std::move(on_boundary));
}

}  // namespace slidedp::hostd
