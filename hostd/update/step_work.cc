#include "hostd/update/step_work.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/units.h"

namespace slidedp::hostd {

StepWork MakeStepWork(const model::StateLayout& layout,
                      const policy::Plan& plan,
                      const policy::GradSchedule& schedule,
                      uint64_t slice_elements) {
  // By unit and begin; ranks are visited in order, so chunks lie in rank order.
  std::map<std::pair<int, uint64_t>, Piece> ordered;
  for (int r = 0; r < plan.ranks; ++r) {
    const std::vector<policy::GradChunk>& sequence = schedule.chunks[r];
    for (uint64_t i = 0; i < sequence.size(); ++i) {
      const policy::GradChunk& chunk = sequence[i];
      Piece& piece = ordered[{chunk.unit, chunk.begin}];
      SDP_CHECK(piece.chunks.empty() || piece.count == chunk.count,
                "ranks cut a unit differently");
      piece.unit = chunk.unit;
      piece.bucket = chunk.bucket;
      piece.begin = chunk.begin;
      piece.count = chunk.count;
      if (piece.chunks.empty()) piece.turn = kLastTurn;
      if (i >= schedule.own[r] && i + schedule.ring[r] < sequence.size()) {
        piece.turn = std::min(piece.turn, i);
      }
      piece.chunks.push_back({r, i});
    }
  }

  StepWork work = {};
  work.slice_elements = slice_elements;
  work.units.resize(layout.units.size());
  work.piece_of.resize(plan.ranks);
  for (int r = 0; r < plan.ranks; ++r) {
    work.piece_of[r].resize(schedule.chunks[r].size());
  }
  for (auto& [key, piece] : ordered) {
    const int index = static_cast<int>(work.pieces.size());
    UnitWork& unit = work.units[piece.unit];
    if (unit.pieces++ == 0) {
      unit.first_piece = index;
      unit.first_slice = work.slices;
    }
    piece.first_slice = work.slices;
    piece.slices = CeilDiv(piece.count, slice_elements);
    work.slices += piece.slices;
    unit.slices += piece.slices;
    for (const ChunkRef& chunk : piece.chunks) {
      work.piece_of[chunk.rank][chunk.index] = index;
    }
    work.pieces.push_back(std::move(piece));
  }

  for (size_t u = 0; u < layout.units.size(); ++u) {
    UnitWork& unit = work.units[u];
    const bool cpu =
        plan.routes(layout.units[u].kind).grads == policy::GradRoute::kCpu;
    if (layout.units[u].frozen()) {
      SDP_CHECK(unit.pieces == 0, "a frozen unit has gradients");
      continue;
    }
    unit.host_sums = cpu && plan.ranks > 1;
    uint64_t covered = 0;
    for (int i = 0; i < unit.pieces; ++i) {
      const Piece& piece = work.pieces[unit.first_piece + i];
      SDP_CHECK(piece.begin == covered, "hole or overlap in a unit's chunks");
      SDP_CHECK(piece.chunks.size() ==
                    static_cast<size_t>(unit.host_sums ? plan.ranks : 1),
                "a range must come from one rank, or from all on route cpu");
      covered += piece.count;
    }
    SDP_CHECK(covered == layout.units[u].count, "chunks don't cover a unit");
  }
  for (const policy::GradBucket& bucket : schedule.buckets) {
    work.buckets.push_back({bucket.unit, {}});
  }
  for (int r = 0; r < plan.ranks; ++r) {
    for (const policy::GradChunk& chunk : schedule.chunks[r]) {
      std::vector<int>& ranks = work.buckets[chunk.bucket].draining_ranks;
      if (ranks.empty() || ranks.back() != r) ranks.push_back(r);
    }
  }
  return work;
}

std::vector<char> UnitsThatChange(const StepWork& work) {
  std::vector<char> changes;
  for (const UnitWork& unit : work.units) changes.push_back(unit.pieces > 0);
  return changes;
}

std::string DescribeUnit(const model::StateLayout& layout, int unit) {
  const model::Unit& u = layout.units[unit];
  const std::string kind(model::UnitKindName(u.kind));
  return u.kind == model::UnitKind::kDecoder
             ? absl::StrCat("unit ", unit, " (", kind, " layer ", u.layer, ")")
             : absl::StrCat("unit ", unit, " (", kind, ")");
}

}  // namespace slidedp::hostd
