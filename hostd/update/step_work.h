// The work of one step, the same in every step: which ranges of which units are
// updated from which gradient chunks. Made once per job from the schedule.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/model/layout.h"
#include "policy/plan.h"

namespace slidedp::hostd {

// Of what nothing in the same step waits for.
inline constexpr uint64_t kLastTurn = ~uint64_t{0};

// A chunk of a rank, by its place in the rank's sequence of one step.
struct ChunkRef {
  int rank;
  uint64_t index;
};

// A range of a unit that one task updates. `gpu_root` and `gpu_sharded`: one
// chunk; `cpu`: the same range of every rank, in rank order.
//
// `turn`: what threads take first. A chunk of the ring whose slot a later chunk
// of the step needs holds ranks up, in the order of draining.
struct Piece {
  int unit, bucket;
  uint64_t begin, count;  // elements from the unit's start
  std::vector<ChunkRef> chunks;
  uint64_t turn;
  // What one thread takes at a time: slice i begins i * slice_elements after
  // `begin`. Numbered over all pieces.
  uint64_t first_slice, slices;
};

// A wholly frozen unit has none.
struct UnitWork {
  int first_piece, pieces;
  uint64_t first_slice, slices;  // of all its pieces
  bool host_sums;  // `cpu` with several ranks: hostd adds the chunks up
};

// What policy::GradBucket cuts a unit into, in the order of draining.
struct BucketWork {
  int unit;
  std::vector<int> draining_ranks;  // ascending
};

struct StepWork {
  std::vector<Piece> pieces;  // by unit, then position
  std::vector<UnitWork> units;
  std::vector<BucketWork> buckets;
  // Per rank, per chunk of a step: the piece that it belongs to.
  std::vector<std::vector<int>> piece_of;
  uint64_t slice_elements;
  uint64_t slices;

  uint64_t chunks(int rank) const { return piece_of[rank].size(); }
  int piece_index(const Piece& piece) const {
    return static_cast<int>(&piece - pieces.data());
  }
};

// 1.7 MB of traffic: 0.3 ms of a thread's work when 32 share 150 GB/s, so that
// a unit's last chunk keeps all threads busy, and taking a slice costs nothing.
inline constexpr uint64_t kSliceElements = uint64_t{1} << 16;

// Checks that the pieces cover every unit exactly once, frozen ones not at all.
StepWork MakeStepWork(const model::StateLayout& layout,
                      const policy::Plan& plan,
                      const policy::GradSchedule& schedule,
                      uint64_t slice_elements = kSliceElements);

// Of each unit, whether a step ever changes it: frozen ones have no pieces.
std::vector<char> UnitsThatChange(const StepWork& work);

// "unit 3 (decoder layer 2)", for messages.
std::string DescribeUnit(const model::StateLayout& layout, int unit);

}  // namespace slidedp::hostd
