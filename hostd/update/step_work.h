// The work of one step, the same in every step: which ranges of which units are
// updated from which gradient chunks. Made once per job from the schedule.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/model/layout.h"
#include "policy/plan.h"

namespace slidedp::hostd {

// A chunk of a rank, by its place in the rank's sequence of one step.
struct ChunkRef {
  int rank;
  uint64_t index;
};

// A range of a unit that one task updates. `gpu_root` and `gpu_sharded`: one
// chunk; `cpu`: the same range of every rank, in rank order.
struct Piece {
  int unit;
  uint64_t begin, count;  // elements from the unit's start
  std::vector<ChunkRef> chunks;
};

struct UnitWork {
  int first_piece, pieces;
  std::vector<int> draining_ranks;  // ascending
  bool host_sums;  // `cpu` with several ranks: hostd adds the chunks up
};

struct StepWork {
  std::vector<Piece> pieces;  // by unit, then position
  std::vector<UnitWork> units;
  // Per rank, per chunk of a step: the piece that it belongs to.
  std::vector<std::vector<int>> piece_of;

  uint64_t chunks(int rank) const { return piece_of[rank].size(); }
};

// Checks that the pieces cover every unit exactly once.
StepWork MakeStepWork(const model::StateLayout& layout,
                      const policy::Plan& plan,
                      const policy::GradSchedule& schedule);

// "unit 3 (decoder layer 2)", for messages.
std::string DescribeUnit(const model::StateLayout& layout, int unit);

}  // namespace slidedp::hostd
