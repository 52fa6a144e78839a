// Which chunks of a step have arrived. Checks the ranks' counters; knows
// nothing of tasks. The coordinator's alone.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "hostd/store/host_state.h"
#include "hostd/update/rank_reports.h"
#include "hostd/update/step_work.h"

namespace slidedp::hostd {

class Arrivals {
 public:
  // The ranks' counters begin where `first_step` does.
  Arrivals(HostState& state, const StepWork& work, const RankReports& reports,
           uint64_t first_step);

  void BeginStep(uint64_t step);
  // Reads every rank's grad_ready once. A counter that goes back, that passes
  // what the ring permits, or that enters a step whose parameters aren't
  // published yet is an error that names the rank.
  absl::Status Poll();

  // Since the last call, in order of arrival: buckets whose first chunks are
  // there from all draining ranks, and pieces whose chunks are.
  std::vector<int> TakeStartedBuckets();
  std::vector<int> TakeCompletePieces();
  bool all_arrived() const { return missing_chunks_ == 0; }

 private:
  void Arrive(int rank, uint64_t index);
  bool Published() const;  // the step's update, of every unit

  HostState& state_;
  const StepWork& work_;
  const RankReports& reports_;
  uint64_t step_ = 0;
  std::vector<uint64_t> seen_;       // per rank, over all steps
  std::vector<int> missing_starts_;  // per bucket: draining ranks
  std::vector<int> missing_of_piece_;
  uint64_t missing_chunks_ = 0;
  std::vector<int> started_buckets_, complete_pieces_;
};

}  // namespace slidedp::hostd
