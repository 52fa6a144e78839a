#include "hostd/update/rank_reports.h"

#include <algorithm>
#include <atomic>
#include <bit>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"

namespace slidedp::hostd {
namespace {

// One load: the rank can't change the value between a check and its use.
template <typename T>
T CopyOnce(T& value) {
  return std::atomic_ref<T>(value).load(std::memory_order_relaxed);
}

}  // namespace

absl::StatusOr<bool> RankReports::Announced(const shm::Word& flag,
                                            uint64_t step, int rank,
                                            const char* field) const {
  const uint64_t value = flag.value.load(std::memory_order_acquire);
  if (value > step + 1) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", rank, ": step report of step ", step, ": ", field,
                     " = ", value, " announces a step that can't have begun"));
  }
  return value == step + 1;
}

absl::StatusOr<std::optional<uint64_t>> RankReports::ValidTokens(
    uint64_t step) const {
  std::optional<uint64_t> tokens;
  for (int r = 0; r < ranks_; ++r) {
    shm::StepReport& report = reports_.step(r, step);
    SDP_ASSIGN_OR_RETURN(const bool begun,
                         Announced(report.begun, step, r, "begun"));
    if (!begun) return std::optional<uint64_t>();
    const uint64_t value = CopyOnce(report.valid_tokens);
    if (tokens.has_value() && *tokens != value) {
      return absl::FailedPreconditionError(
          absl::StrCat("rank ", r, ": step ", step, ": valid_tokens = ", value,
                       ", but rank 0 says ", *tokens));
    }
    tokens = value;
  }
  return tokens;
}

absl::StatusOr<std::vector<uint64_t>> RankReports::UsedRows(
    uint64_t step) const {
  std::vector<uint64_t> used(shm::RowWords(rows_));
  if (used.empty()) return used;
  const uint64_t last_bits =
      rows_ % 64 == 0 ? ~uint64_t{0} : (uint64_t{1} << (rows_ % 64)) - 1;
  for (int r = 0; r < ranks_; ++r) {
    uint64_t* words = reports_.used_rows(r, step);
    uint64_t word = 0;
    for (size_t w = 0; w < used.size(); ++w) {
      word = CopyOnce(words[w]);
      used[w] |= word;
    }
    if ((word & ~last_bits) == 0) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", r, ": step report of step ", step, ": used_rows names row ",
        64 * (used.size() - 1) + std::countr_zero(word & ~last_bits), " of ",
        rows_));
  }
  return used;
}

absl::StatusOr<bool> RankReports::Embedded(uint64_t step) const {
  for (int r = 0; r < ranks_; ++r) {
    SDP_ASSIGN_OR_RETURN(
        const bool done,
        Announced(reports_.step(r, step).embedded, step, r, "embedded"));
    if (!done) return false;
  }
  return true;
}

absl::StatusOr<std::optional<std::vector<double>>> RankReports::LossSums(
    uint64_t step) const {
  std::vector<double> sums;
  for (int r = 0; r < ranks_; ++r) {
    shm::StepReport& report = reports_.step(r, step);
    SDP_ASSIGN_OR_RETURN(const bool ready,
                         Announced(report.loss_ready, step, r, "loss_ready"));
    if (!ready) return std::optional<std::vector<double>>();
    sums.push_back(CopyOnce(report.loss_sum));
  }
  return std::optional<std::vector<double>>(std::move(sums));
}

StepTimes RankReports::Times(uint64_t step) const {
  StepTimes times;
  times.complete = true;
  for (int r = 0; r < ranks_; ++r) {
    shm::StepReport& report = reports_.step(r, step);
    if (report.times_ready.value.load(std::memory_order_acquire) != step + 1) {
      times.complete = false;
      continue;
    }
    const int64_t begin_ns = CopyOnce(report.begin_ns);
    times.begin_ns =
        times.begin_ns == 0 ? begin_ns : std::min(times.begin_ns, begin_ns);
    times.deliver_ns = std::max(times.deliver_ns, CopyOnce(report.deliver_ns));
    times.compute_ns = std::max(times.compute_ns, CopyOnce(report.compute_ns));
    times.reduce_ns = std::max(times.reduce_ns, CopyOnce(report.reduce_ns));
    times.drain_ns = std::max(times.drain_ns, CopyOnce(report.drain_ns));
    times.stall_ns = std::max(times.stall_ns, CopyOnce(report.stall_ns));
    times.offload_ns = std::max(times.offload_ns, CopyOnce(report.offload_ns));
    times.offload_wait_ns =
        std::max(times.offload_wait_ns, CopyOnce(report.offload_wait_ns));
  }
  return times;
}

double RankReports::SquareNorm(int rank, int bucket) const {
  return CopyOnce(reports_.square_norm(rank, bucket));
}

uint64_t RankReports::GradReady(int rank) const {
  return reports_.grad_ready(rank).load(std::memory_order_acquire);
}

}  // namespace slidedp::hostd
