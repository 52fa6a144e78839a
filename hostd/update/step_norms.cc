#include "hostd/update/step_norms.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"

namespace slidedp::hostd {

void StepNorms::BeginStep(uint64_t step) {
  const size_t buckets = work_.buckets.size();
  step_ = step;
  loss_sums_.reset();
  reported_.assign(buckets, std::nullopt);
  bad_rank_.assign(buckets, -1);
  gates_.assign(buckets, Gate::kClosed);
  speculating_ = speculated_ = false;
  next_ = 0;
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

absl::Status StepNorms::Read(int bucket) {
  double sum = 0;
  for (int r : work_.buckets[bucket].draining_ranks) {
    const double square_norm = reports_.SquareNorm(r, bucket);
    if (FiniteSquareNorm(square_norm)) {
      sum += square_norm;
      continue;
    }
    sum = std::nan("");
    bad_rank_[bucket] = r;
    if (!eager_) break;
    return absl::FailedPreconditionError(absl::StrCat(
        DescribeUnit(layout_, work_.buckets[bucket].unit), ", rank ", r,
        ", step ", step_, ": the gradient is not finite (squared norm ",
        square_norm,
        "); it was not applied; lower the learning rate, or set max_grad_norm "
        "so that such steps are skipped"));
  }
  reported_[bucket] = sum;
  return absl::OkStatus();
}

void StepNorms::OpenBuckets() {
  if (eager_) {
    for (size_t b = 0; b < gates_.size(); ++b) {
      if (reported_[b].has_value()) gates_[b] = Gate::kOpen;
    }
    return;
  }
  if (!std::all_of(loss_sums_->begin(), loss_sums_->end(),
                   [](double sum) { return std::isfinite(sum); })) {
    speculating_ = false;
  }
  for (; next_ < gates_.size(); ++next_) {
    const std::optional<double> square_norm = SquareNorm(next_);
    if (!square_norm.has_value()) return;
    sum_of_squares_ += *square_norm;
    // Past max_grad_norm, clipping is certain. Not finite: the step is skipped.
    const double limit = max_grad_norm_ > 0
                             ? max_grad_norm_ * max_grad_norm_
                             : std::numeric_limits<double>::max();
    if (!(sum_of_squares_ <= limit)) speculating_ = false;
    gates_[next_] = speculating_ ? Gate::kOpen : Gate::kAfterDecision;
    speculated_ |= speculating_;
  }
}

std::optional<double> StepNorms::SquareNorm(size_t bucket) const {
  const std::optional<double>& reported = reported_[bucket];
  const int unit = work_.buckets[bucket].unit;
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
  for (size_t b = 0; b < work_.buckets.size(); ++b) {
    sum += SquareNorm(b).value();
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
  for (size_t b = 0; b < work_.buckets.size(); ++b) {
    if (FiniteSquareNorm(SquareNorm(b).value())) continue;
    return absl::StrCat("the gradient of ",
                        DescribeUnit(layout_, work_.buckets[b].unit),
                        " is not finite (",
                        bad_rank_[b] < 0 ? "the sum of the ranks'"
                                         : absl::StrCat("rank ", bad_rank_[b]),
                        ")");
  }
  return "the gradient norm is not finite";
}

}  // namespace slidedp::hostd
