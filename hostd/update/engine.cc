// The coordinator: decides, step by step, what the update workers may do.
#include "hostd/update/engine.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
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
         OnFailure on_failure)
      : config_(config),
        layout_(state.layout()),
        mode_(state.plan().update_mode),
        eager_(mode_ == policy::UpdateMode::kEager),
        work_(MakeStepWork(layout_, state.plan(), state.grad_schedule(),
                           config.slice_elements)),
        reports_(state.reports(), state.plan().ranks,
                 policy::ReportedRows(layout_)),
        arrivals_(state, work_, reports_),
        workers_(std::make_unique<UpdateWorkers>(state, work_, config.threads,
                                                 config.recorder)),
        on_step_(std::move(on_step)),
        on_failure_(std::move(on_failure)),
        clip_history_(config.clip_history) {
    coordinator_ = std::thread([this] { Coordinate(); });
  }
  ~Engine() override { Stop(); }

  void Stop() override;
  uint64_t steps_done() const override { return steps_done_; }

 private:
  // What may be done with a unit's complete pieces.
  enum class Gate { kClosed, kOpen, kAfterDecision };

  // A step under way.
  struct Step {
    uint64_t index = 0;
    uint64_t valid_tokens = 0;
    int64_t begin_ns = 0;  // as seen here
    double lr = 0;
    std::optional<std::vector<double>> loss_sums;  // per rank
    // The table's other rows are under way, or there are none.
    bool rows_begun = false;
    // Per unit: of the draining ranks together; not finite if any rank's isn't.
    std::vector<double> square_norms;
    std::vector<char> norm_reported;  // per unit
    std::vector<Gate> gates;          // per unit
    std::vector<int> waiting;         // complete pieces of closed units
    // Speculation goes from the last unit to the first, whatever the order of
    // arrival, so that bits don't depend on it.
    bool speculating = false, speculated = false;
    int next_unit = 0;          // whose norm comes next into the sum
    double sum_of_squares = 0;  // of the units after it
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
  absl::Status ReadLosses();
  // Eager mode: an error if any draining rank's norm is not finite.
  absl::Status ReadSquareNorms(int unit);
  void OpenUnits();
  // Of the unit; nothing while it isn't known. A rank that calls its part not
  // finite is believed, whatever the sum.
  std::optional<double> SquareNorm(int unit) const;
  bool LossesAreFinite() const;
  bool Predicts() const;  // that the step will not be clipped
  // sqrt of all units' squared norms, in unit order.
  double TotalNorm() const;
  std::string SkipReason() const;
  AdamWStep EarlyAdamW() const;
  void PollSoon();  // something arrived, and more may follow
  void Complete();
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
  const OnStep on_step_;
  const OnFailure on_failure_;
  Step step_;
  uint64_t updates_applied_ = 0;
  uint64_t clip_history_;
  std::optional<StepResult> pending_;
  int64_t sleep_ns_ = kFirstSleepNs;
  int quiet_polls_ = 0;  // since something arrived

  std::atomic<uint64_t> steps_done_ = 0;
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
  for (uint64_t step = 0; status.ok() && step < config_.schedule.total_steps;
       ++step) {
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
    const bool idle =
        ++quiet_polls_ >= kPollsUntilIdle && !step_.loss_sums.has_value();
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
  const size_t units = layout_.units.size();
  step_.square_norms.assign(units, 0);
  step_.norm_reported.assign(units, 0);
  step_.gates.assign(units, Gate::kClosed);
  step_.next_unit = static_cast<int>(units) - 1;
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
    if (!step_.loss_sums.has_value() || !arrivals_.all_arrived()) return false;
    return at_once
               ? workers_->progress().units_published == static_cast<int>(units)
               : step_.next_unit < 0;
  }));
  if (!at_once) {
    SDP_RETURN_IF_ERROR(Decide());
  } else if (step_.valid_tokens > 0) {
    step_.grad_norm = TotalNorm();
  }
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
  step_.speculating = mode_ == policy::UpdateMode::kSpeculative && Predicts();
  // Where an update can't be undone, nothing is done that may have to be.
  if (eager_ || CanUndo(EarlyAdamW())) return absl::OkStatus();
  step_.speculating = false;
  step_.rows_begun = true;
  return absl::OkStatus();
}

absl::Status Engine::Advance() {
  SDP_RETURN_IF_ERROR(arrivals_.Poll());
  SDP_RETURN_IF_ERROR(BeginRows());
  SDP_RETURN_IF_ERROR(ReadLosses());
  for (int unit : arrivals_.TakeStartedUnits()) {
    SDP_RETURN_IF_ERROR(ReadSquareNorms(unit));
    step_.norm_reported[unit] = true;
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
  if (!step_.loss_sums.has_value()) return absl::OkStatus();
  OpenUnits();
  std::vector<int> open, closed;
  for (int piece : step_.waiting) {
    const Gate gate = step_.gates[work_.pieces[piece].unit];
    if (gate == Gate::kAfterDecision) continue;
    (gate == Gate::kOpen ? open : closed).push_back(piece);
  }
  workers_->Update(open);
  step_.waiting = std::move(closed);
  return absl::OkStatus();
}

// With the losses known: which units' pieces go on at once.
void Engine::OpenUnits() {
  if (eager_) {
    for (size_t u = 0; u < step_.gates.size(); ++u) {
      if (step_.norm_reported[u]) step_.gates[u] = Gate::kOpen;
    }
    return;
  }
  if (!LossesAreFinite()) step_.speculating = false;
  for (int& unit = step_.next_unit; unit >= 0; --unit) {
    const std::optional<double> square_norm = SquareNorm(unit);
    if (!square_norm.has_value()) return;
    step_.sum_of_squares += *square_norm;
    // Past max_grad_norm, clipping is certain. Not finite: the step is skipped.
    const double limit = config_.max_grad_norm > 0
                             ? config_.max_grad_norm * config_.max_grad_norm
                             : std::numeric_limits<double>::max();
    if (!(step_.sum_of_squares <= limit)) step_.speculating = false;
    step_.gates[unit] = step_.speculating ? Gate::kOpen : Gate::kAfterDecision;
    step_.speculated |= step_.speculating;
  }
}

absl::Status Engine::Decide() {
  step_.grad_norm = TotalNorm();
  step_.skip_reason = SkipReason();
  if (!step_.skip_reason.empty()) {
    workers_->Decide(std::nullopt);
  } else {
    if (config_.max_grad_norm > 0) {
      step_.clip_coefficient = static_cast<float>(
          std::min(1.0, config_.max_grad_norm / (step_.grad_norm + 1e-6)));
    }
    workers_->Decide(static_cast<float>(step_.clip_coefficient));
  }
  return AwaitPublication();
}

absl::Status Engine::BeginRows() {
  if (step_.rows_begun) return absl::OkStatus();
  SDP_ASSIGN_OR_RETURN(const bool embedded, reports_.Embedded(step_.index));
  if (!embedded) return absl::OkStatus();
  step_.rows_begun = true;
  SDP_ASSIGN_OR_RETURN(std::vector<uint64_t> used,
                       reports_.UsedRows(step_.index));
  if (!used.empty()) workers_->UpdateOtherRows(std::move(used));
  return absl::OkStatus();
}

absl::Status Engine::ReadLosses() {
  if (step_.loss_sums.has_value()) return absl::OkStatus();
  SDP_ASSIGN_OR_RETURN(step_.loss_sums, reports_.LossSums(step_.index));
  if (!step_.loss_sums.has_value()) return absl::OkStatus();
  PollSoon();
  // In a rank's order, its reads of the embedding unit are over before.
  SDP_RETURN_IF_ERROR(BeginRows());
  if (!step_.rows_begun) {
    return absl::FailedPreconditionError(absl::StrCat(
        "step report of step ", step_.index,
        ": every rank's loss is there, but not every rank's embedded"));
  }
  if (!eager_ || step_.valid_tokens == 0) return absl::OkStatus();
  for (size_t r = 0; r < step_.loss_sums->size(); ++r) {
    if (std::isfinite((*step_.loss_sums)[r])) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", r, ", step ", step_.index,
                     ": the loss is not finite (", (*step_.loss_sums)[r],
                     "); no gradient of this step was applied; lower the "
                     "learning rate, or set "
                     "max_grad_norm so that such steps are skipped"));
  }
  return absl::OkStatus();
}

absl::Status Engine::ReadSquareNorms(int unit) {
  double sum = 0;
  for (int r : work_.units[unit].draining_ranks) {
    const double square_norm = reports_.UnitSquareNorm(r, unit);
    if (FiniteSquareNorm(square_norm)) {
      sum += square_norm;
      continue;
    }
    sum = std::nan("");
    if (!eager_) break;
    return absl::FailedPreconditionError(absl::StrCat(
        DescribeUnit(layout_, unit), ", rank ", r, ", step ", step_.index,
        ": the gradient is not finite (squared norm ", square_norm,
        "); no gradient of this unit was applied; lower the learning rate, or "
        "set "
        "max_grad_norm so that such steps are skipped"));
  }
  step_.square_norms[unit] = sum;
  return absl::OkStatus();
}

std::optional<double> Engine::SquareNorm(int unit) const {
  if (!step_.norm_reported[unit]) return std::nullopt;
  const double reported = step_.square_norms[unit];
  return work_.units[unit].host_sums && FiniteSquareNorm(reported)
             ? workers_->HostSquareNorm(unit)
             : reported;
}

double Engine::TotalNorm() const {
  double sum = 0;
  for (size_t u = 0; u < layout_.units.size(); ++u) {
    sum += SquareNorm(static_cast<int>(u)).value();
  }
  return std::sqrt(sum);
}

bool Engine::LossesAreFinite() const {
  return std::all_of(step_.loss_sums->begin(), step_.loss_sums->end(),
                     [](double sum) { return std::isfinite(sum); });
}

bool Engine::Predicts() const {
  const uint64_t last = clip_history_ & ((uint64_t{1} << kPredictorSteps) - 1);
  return std::popcount(last) < config_.clipped_to_defer;
}

std::string Engine::SkipReason() const {
  for (size_t r = 0; r < step_.loss_sums->size(); ++r) {
    if (!std::isfinite((*step_.loss_sums)[r])) {
      return absl::StrCat("the loss of rank ", r, " is not finite");
    }
  }
  if (std::isfinite(step_.grad_norm)) return "";
  for (size_t u = 0; u < layout_.units.size(); ++u) {
    const int unit = static_cast<int>(u);
    if (!FiniteSquareNorm(SquareNorm(unit).value())) {
      return absl::StrCat("the gradient of ", DescribeUnit(layout_, unit),
                          " is not finite");
    }
  }
  return "the gradient norm is not finite";
}

void Engine::PollSoon() {
  sleep_ns_ = kFirstSleepNs;
  quiet_polls_ = 0;
}

AdamWStep Engine::EarlyAdamW() const {
  AdamWStep step =
      MakeAdamWStep(step_.lr, config_.beta1, config_.beta2, config_.eps,
                    config_.weight_decay, updates_applied_ + 1, 1);
  step.streaming = config_.threads >= kStreamingThreads;
  return step;
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
  double loss = 0;
  for (double sum : *step_.loss_sums) loss += sum;
  StepResult result = {};
  result.step = step_.index;
  result.loss = step_.valid_tokens > 0
                    ? loss / static_cast<double>(step_.valid_tokens)
                    : std::nan("");
  result.grad_norm = step_.grad_norm;
  result.clip_coefficient = step_.clip_coefficient;
  result.lr = step_.lr;
  result.valid_tokens = step_.valid_tokens;
  result.speculated = step_.speculated;
  result.clip_history = clip_history_;
  result.skipped = skipped;
  result.skip_reason = step_.skip_reason;
  result.begin_ns = step_.begin_ns;
  result.end_ns = progress.published_ns;
  result.update_ns = progress.busiest_ns;
  pending_ = std::move(result);
  steps_done_ = step_.index + 1;
  EmitPending(false);
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
  on_step_(result);
}

}  // namespace

std::unique_ptr<UpdateEngine> UpdateEngine::Start(HostState& state,
                                                  const UpdateConfig& config,
                                                  OnStep on_step,
                                                  OnFailure on_failure) {
  SDP_CHECK(config.threads >= 1, "no update threads");
  return std::make_unique<Engine>(state, config, std::move(on_step),
                                  std::move(on_failure));
}

}  // namespace slidedp::hostd
