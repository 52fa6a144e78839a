#include "hostd/update/arrivals.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"

namespace slidedp::hostd {

Arrivals::Arrivals(HostState& state, const StepWork& work,
                   const RankReports& reports, uint64_t first_step)
    : state_(state),
      work_(work),
      reports_(reports),
      seen_(work.piece_of.size()),
      missing_starts_(work.buckets.size()),
      missing_of_piece_(work.pieces.size()) {
  for (size_t r = 0; r < seen_.size(); ++r) {
    seen_[r] = first_step * work.chunks(static_cast<int>(r));
  }
}

void Arrivals::BeginStep(uint64_t step) {
  step_ = step;
  for (size_t b = 0; b < work_.buckets.size(); ++b) {
    missing_starts_[b] =
        static_cast<int>(work_.buckets[b].draining_ranks.size());
  }
  missing_chunks_ = 0;
  for (size_t p = 0; p < work_.pieces.size(); ++p) {
    missing_of_piece_[p] = static_cast<int>(work_.pieces[p].chunks.size());
    missing_chunks_ += work_.pieces[p].chunks.size();
  }
  started_buckets_.clear();
  complete_pieces_.clear();
}

absl::Status Arrivals::Poll() {
  for (size_t r = 0; r < seen_.size(); ++r) {
    const int rank = static_cast<int>(r);
    const uint64_t ready = reports_.GradReady(rank);
    // hostd's own words are read after the rank's, so that what the rank saw
    // of them is seen here too.
    const uint64_t freed =
        state_.versions().grad_free(r).load(std::memory_order_relaxed);
    const uint64_t chunks = work_.chunks(rank);
    // A step ends with all chunks free.
    const uint64_t begin = chunks == 0 ? 0 : freed / chunks * chunks;
    const uint64_t most =
        begin + state_.grad_schedule().WrittenAtMost(rank, freed - begin);
    if (ready < seen_[r] || ready > most) {
      return absl::FailedPreconditionError(absl::StrCat(
          "rank ", r, ": grad_ready = ", ready, " in step ", step_,
          ": must be at least ", seen_[r], " as before, and at most ", most,
          " for its slots with ", freed, " chunks freed"));
    }
    const uint64_t step_end = (step_ + 1) * chunks;
    if (ready > step_end && !Published()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "rank ", r, ": grad_ready = ", ready, ": a chunk of step ", step_ + 1,
          " before the parameters of that step were published"));
    }
    for (const uint64_t end = std::min(ready, step_end); seen_[r] < end;
         ++seen_[r]) {
      Arrive(rank, seen_[r] - step_ * work_.chunks(rank));
    }
  }
  return absl::OkStatus();
}

bool Arrivals::Published() const {
  for (size_t u = 0; u < work_.units.size(); ++u) {
    if (state_.versions().param_version(u).load(std::memory_order_relaxed) <=
        step_) {
      return false;
    }
  }
  return true;
}

void Arrivals::Arrive(int rank, uint64_t index) {
  const int piece = work_.piece_of[rank][index];
  const int bucket = work_.pieces[piece].bucket;
  --missing_chunks_;
  const bool first =
      index == 0 ||
      work_.pieces[work_.piece_of[rank][index - 1]].bucket != bucket;
  if (first && --missing_starts_[bucket] == 0) {
    started_buckets_.push_back(bucket);
  }
  if (--missing_of_piece_[piece] == 0) complete_pieces_.push_back(piece);
}

std::vector<int> Arrivals::TakeStartedBuckets() {
  return std::exchange(started_buckets_, {});
}

std::vector<int> Arrivals::TakeCompletePieces() {
  return std::exchange(complete_pieces_, {});
}

}  // namespace slidedp::hostd
