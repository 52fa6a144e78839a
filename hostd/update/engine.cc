// The coordinator: decides, step by step, what the update workers may do.
#include "hostd/update/engine.h"

#include <algorithm>
#include <atomic>
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
#include "hostd/update/step_work.h"
#include "hostd/update/workers.h"

namespace slidedp::hostd {
namespace {

// Sleeps between polls double up to 50 us; once nothing has arrived for some 5
// ms (a forward pass, say), to 0.5 ms, which is then a small part of the wait.
constexpr int64_t kFirstSleepNs = 2'000, kLongestSleepNs = 50'000;
constexpr int64_t kLongestIdleSleepNs = 500'000;
constexpr int kPollsUntilIdle = 100;

class Engine final : public UpdateEngine {
 public:
  Engine(HostState& state, const UpdateConfig& config, OnStep on_step,
         OnFailure on_failure)
      : config_(config),
        layout_(state.layout()),
        eager_(state.plan().update_mode == policy::UpdateMode::kEager),
        work_(MakeStepWork(layout_, state.plan(), state.grad_schedule())),
        reports_(state.reports(), state.plan().ranks),
        arrivals_(state, work_, reports_),
        workers_(std::make_unique<UpdateWorkers>(state, work_, config.threads)),
        on_step_(std::move(on_step)),
        on_failure_(std::move(on_failure)) {
    coordinator_ = std::thread([this] { Coordinate(); });
  }
  ~Engine() override { Stop(); }

  void Stop() override;
  uint64_t steps_done() const override { return steps_done_; }

 private:
  // A step under way.
  struct Step {
    uint64_t index = 0;
    uint64_t valid_tokens = 0;
    int64_t begin_ns = 0;  // as seen here
    double lr = 0;
    std::optional<std::vector<double>> loss_sums;  // per rank
    // Per unit: of the draining ranks together; not finite if any rank's isn't.
    std::vector<double> square_norms;
    double grad_norm = 0, clip_coefficient = 1;
    std::string skip_reason;
  };

  void Coordinate();
  absl::Status RunStep(uint64_t index);
  absl::Status RunEager();
  absl::Status RunDeferred();
  // Calls `poll` until it returns true, sleeping between calls. Cancelled if
  // the engine is to stop.
  absl::Status Await(absl::FunctionRef<absl::StatusOr<bool>()> poll);
  absl::Status AwaitPublication();

  absl::Status ReadLosses();
  // Eager mode: an error if any draining rank's norm is not finite.
  absl::Status ReadSquareNorms(int unit);
  // sqrt of all units' squared norms, in unit order.
  double TotalNorm() const;
  std::string DeferredSkipReason() const;
  void SetAdamW();
  void PollSoon();  // something arrived, and more may follow
  void PushUpdates(const std::vector<int>& pieces);
  void Complete();
  // The result waits for the ranks' times, but not beyond the next step's
  // completion: `now`.
  void EmitPending(bool now);

  const UpdateConfig config_;
  const model::StateLayout& layout_;
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
    sleep_ns_ = std::min(2 * sleep_ns_, ++quiet_polls_ < kPollsUntilIdle
                                            ? kLongestSleepNs
                                            : kLongestIdleSleepNs);
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
  step_.square_norms.assign(layout_.units.size(), 0);
  workers_->BeginStep(index);
  arrivals_.BeginStep(index);
  SDP_RETURN_IF_ERROR(Await([&]() -> absl::StatusOr<bool> {
    SDP_ASSIGN_OR_RETURN(const std::optional<uint64_t> tokens,
                         reports_.ValidTokens(index));
    if (!tokens.has_value()) return false;
    step_.valid_tokens = *tokens;
    return true;
  }));
  step_.begin_ns = MonotonicNs();
  if (step_.valid_tokens == 0) step_.skip_reason = "no valid tokens";
  SDP_RETURN_IF_ERROR(eager_ ? RunEager() : RunDeferred());
  Complete();
  return absl::OkStatus();
}

absl::Status Engine::RunEager() {
  const bool skipped = !step_.skip_reason.empty();
  if (!skipped) SetAdamW();
  std::vector<bool> open(layout_.units.size());
  std::vector<int> started, held;  // units and pieces that wait
  SDP_RETURN_IF_ERROR(Await([&]() -> absl::StatusOr<bool> {
    SDP_RETURN_IF_ERROR(arrivals_.Poll());
    SDP_RETURN_IF_ERROR(ReadLosses());
    std::vector<int> complete = arrivals_.TakeCompletePieces();
    if (!complete.empty()) PollSoon();
    if (skipped) {
      workers_->Skip(complete);
    } else {
      held.insert(held.end(), complete.begin(), complete.end());
      const std::vector<int> units = arrivals_.TakeStartedUnits();
      started.insert(started.end(), units.begin(), units.end());
      if (step_.loss_sums.has_value()) {
        for (int unit : std::exchange(started, {})) {
          SDP_RETURN_IF_ERROR(ReadSquareNorms(unit));
          open[unit] = true;
        }
        const auto waiting = std::stable_partition(
            held.begin(), held.end(),
            [&](int piece) { return !open[work_.pieces[piece].unit]; });
        PushUpdates({waiting, held.end()});
        held.erase(waiting, held.end());
      }
    }
    return step_.loss_sums.has_value() &&
           workers_->progress().units_published ==
               static_cast<int>(layout_.units.size());
  }));
  if (!skipped) step_.grad_norm = TotalNorm();
  return absl::OkStatus();
}

absl::Status Engine::RunDeferred() {
  const bool empty = !step_.skip_reason.empty();
  SDP_RETURN_IF_ERROR(Await([&]() -> absl::StatusOr<bool> {
    SDP_RETURN_IF_ERROR(arrivals_.Poll());
    SDP_RETURN_IF_ERROR(ReadLosses());
    for (int unit : arrivals_.TakeStartedUnits()) {
      SDP_RETURN_IF_ERROR(ReadSquareNorms(unit));
    }
    const std::vector<int> complete = arrivals_.TakeCompletePieces();
    if (!complete.empty()) PollSoon();
    if (empty) {
      workers_->Skip(complete);
    } else {
      std::vector<Task> sums;
      for (int piece : complete) {
        const int unit = work_.pieces[piece].unit;
        if (!work_.units[unit].host_sums) continue;
        sums.push_back({unit, TaskKind::kSum, static_cast<uint64_t>(piece)});
      }
      workers_->Push(sums);
    }
    return arrivals_.all_arrived() && step_.loss_sums.has_value() &&
           workers_->progress().tasks_left == 0;
  }));
  if (empty) return AwaitPublication();

  step_.grad_norm = TotalNorm();
  step_.skip_reason = DeferredSkipReason();
  std::vector<int> pieces(work_.pieces.size());
  for (size_t i = 0; i < pieces.size(); ++i) pieces[i] = static_cast<int>(i);
  if (!step_.skip_reason.empty()) {
    workers_->Skip(pieces);
  } else {
    if (config_.max_grad_norm > 0) {
      step_.clip_coefficient = static_cast<float>(
          std::min(1.0, config_.max_grad_norm / (step_.grad_norm + 1e-6)));
    }
    SetAdamW();
    PushUpdates(pieces);
  }
  return AwaitPublication();
}

absl::Status Engine::ReadLosses() {
  if (step_.loss_sums.has_value()) return absl::OkStatus();
  SDP_ASSIGN_OR_RETURN(step_.loss_sums, reports_.LossSums(step_.index));
  if (!step_.loss_sums.has_value()) return absl::OkStatus();
  PollSoon();
  if (!eager_ || step_.valid_tokens == 0) return absl::OkStatus();
  for (size_t r = 0; r < step_.loss_sums->size(); ++r) {
    if (std::isfinite((*step_.loss_sums)[r])) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", r, ", step ", step_.index, ": the loss is not finite (",
        (*step_.loss_sums)[r],
        "); nothing of this step was applied; lower the learning rate, or set "
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
        "); nothing of this unit was applied; lower the learning rate, or set "
        "max_grad_norm so that such steps are skipped"));
  }
  step_.square_norms[unit] = sum;
  return absl::OkStatus();
}

double Engine::TotalNorm() const {
  double sum = 0;
  for (size_t u = 0; u < layout_.units.size(); ++u) {
    const int unit = static_cast<int>(u);
    // A rank that calls its part not finite is believed, whatever the sum.
    sum += work_.units[u].host_sums && FiniteSquareNorm(step_.square_norms[u])
               ? workers_->HostSquareNorm(unit)
               : step_.square_norms[u];
  }
  return std::sqrt(sum);
}

std::string Engine::DeferredSkipReason() const {
  for (size_t r = 0; r < step_.loss_sums->size(); ++r) {
    if (!std::isfinite((*step_.loss_sums)[r])) {
      return absl::StrCat("the loss of rank ", r, " is not finite");
    }
  }
  if (std::isfinite(step_.grad_norm)) return "";
  for (size_t u = 0; u < layout_.units.size(); ++u) {
    const int unit = static_cast<int>(u);
    if (!FiniteSquareNorm(step_.square_norms[u]) ||
        (work_.units[u].host_sums &&
         !FiniteSquareNorm(workers_->HostSquareNorm(unit)))) {
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

void Engine::SetAdamW() {
  workers_->SetAdamW(MakeAdamWStep(
      step_.lr, config_.beta1, config_.beta2, config_.eps, config_.weight_decay,
      updates_applied_ + 1, step_.clip_coefficient));
}

void Engine::PushUpdates(const std::vector<int>& pieces) {
  std::vector<Task> tasks;
  tasks.reserve(pieces.size());
  for (int piece : pieces) {
    tasks.push_back({work_.pieces[piece].unit, TaskKind::kUpdate,
                     static_cast<uint64_t>(piece)});
  }
  workers_->Push(tasks);
}

void Engine::Complete() {
  EmitPending(true);
  const bool skipped = !step_.skip_reason.empty();
  updates_applied_ += !skipped;
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
