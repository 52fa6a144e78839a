#include "hostd/update/step_norms.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"

namespace slidedp::hostd {

void StepNorms::BeginStep(uint64_t step) {
  const size_t units = layout_.units.size();
  step_ = step;
  loss_sums_.reset();
  reported_.assign(units, std::nullopt);
  bad_rank_.assign(units, -1);
  for (size_t u = 0; u < units; ++u) {
    if (work_.units[u].pieces == 0) reported_[u] = 0;
  }
  gates_.assign(units, Gate::kClosed);
  speculating_ = speculated_ = false;
  next_unit_ = static_cast<int>(units) - 1;
  sum_of_squares_ = 0;
}

absl::StatusOr<bool> StepNorms::ReadLosses(bool has_tokens) {
  if (loss_sums_.has_value()) return false;
  SDP_ASSIGN_OR_RETURN(loss_sums_, reports_.LossSums(step_));
  if (!loss_sums_.has_value()) return false;
  if (!eager_ || !has_tokens) return true;
  for (size_t r = 0; r < loss_sums_->size(); ++r) {
    if (std::isfinite((*loss_sums_)[r])) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", r, ", step ", step_, ": the loss is not finite (",
        (*loss_sums_)[r],
        "); no gradient of this step was applied; lower the learning rate, or "
        "set max_grad_norm so that such steps are skipped"));
  }
  return true;
}

absl::Status StepNorms::ReadUnit(int unit) {
  double sum = 0;
  for (int r : work_.units[unit].draining_ranks) {
    const double square_norm = reports_.UnitSquareNorm(r, unit);
    if (FiniteSquareNorm(square_norm)) {
      sum += square_norm;
      continue;
    }
    sum = std::nan("");
    bad_rank_[unit] = r;
    if (!eager_) break;
    return absl::FailedPreconditionError(absl::StrCat(
        DescribeUnit(layout_, unit), ", rank ", r, ", step ", step_,
        ": the gradient is not finite (squared norm ", square_norm,
        "); no gradient of this unit was applied; lower the learning rate, or "
        "set max_grad_norm so that such steps are skipped"));
  }
  reported_[unit] = sum;
  return absl::OkStatus();
}

void StepNorms::OpenUnits() {
  if (eager_) {
    for (size_t u = 0; u < gates_.size(); ++u) {
      if (reported_[u].has_value()) gates_[u] = Gate::kOpen;
    }
    return;
  }
  if (!std::all_of(loss_sums_->begin(), loss_sums_->end(),
                   [](double sum) { return std::isfinite(sum); })) {
    speculating_ = false;
  }
  for (; next_unit_ >= 0; --next_unit_) {
    const std::optional<double> square_norm = SquareNorm(next_unit_);
    if (!square_norm.has_value()) return;
    sum_of_squares_ += *square_norm;
    // Past max_grad_norm, clipping is certain. Not finite: the step is skipped.
    const double limit = max_grad_norm_ > 0
                             ? max_grad_norm_ * max_grad_norm_
                             : std::numeric_limits<double>::max();
    if (!(sum_of_squares_ <= limit)) speculating_ = false;
    gates_[next_unit_] = speculating_ ? Gate::kOpen : Gate::kAfterDecision;
    speculated_ |= speculating_;
  }
}

std::optional<double> StepNorms::SquareNorm(int unit) const {
  const std::optional<double>& reported = reported_[unit];
  return reported.has_value() && work_.units[unit].host_sums &&
                 FiniteSquareNorm(*reported)
             ? workers_.HostSquareNorm(unit)
             : reported;
}

double StepNorms::loss_sum() const {
  double sum = 0;
  for (double of_rank : *loss_sums_) sum += of_rank;
  return sum;
}

double StepNorms::TotalNorm() const {
  double sum = 0;
  for (size_t u = 0; u < layout_.units.size(); ++u) {
    sum += SquareNorm(static_cast<int>(u)).value();
  }
  return std::sqrt(sum);
}

double StepNorms::ClipCoefficient(double total_norm) const {
  if (max_grad_norm_ <= 0) return 1;
  return static_cast<float>(
      std::min(1.0, max_grad_norm_ / (total_norm + 1e-6)));
}

std::string StepNorms::SkipReason(double total_norm) const {
  for (size_t r = 0; r < loss_sums_->size(); ++r) {
    if (!std::isfinite((*loss_sums_)[r])) {
      return absl::StrCat("the loss of rank ", r, " is not finite");
    }
  }
  if (std::isfinite(total_norm)) return "";
  for (size_t u = 0; u < layout_.units.size(); ++u) {
    const int unit = static_cast<int>(u);
    if (!FiniteSquareNorm(SquareNorm(unit).value())) {
      return absl::StrCat(
          "the gradient of ", DescribeUnit(layout_, unit), " is not finite (",
          bad_rank_[u] < 0 ? "the sum of the ranks'"
                           : absl::StrCat("rank ", bad_rank_[u]),
          ")");
    }
  }
  return "the gradient norm is not finite";
}

}  // namespace slidedp::hostd
