#include "hostd/store/host_state.h"

#include <utility>

#include "common/base/check.h"
#include "common/base/status.h"
#include "hostd/store/bind.h"

namespace slidedp::hostd {
namespace {

constexpr shm::SegmentKind kKinds[] = {
    shm::SegmentKind::kParams,  shm::SegmentKind::kState,
    shm::SegmentKind::kGrads,   shm::SegmentKind::kVersions,
    shm::SegmentKind::kReports, shm::SegmentKind::kExchange,
};

}  // namespace

absl::StatusOr<std::unique_ptr<HostState>> HostState::Create(
    const std::string& job, const model::StateLayout& layout,
    const policy::Plan& plan, const Placement& placement) {
  auto state = std::unique_ptr<HostState>(new HostState());
  state->layout_ = layout;
  state->plan_ = plan;
  state->schedule_ = policy::MakeGradSchedule(layout, plan);
  state->placement_ = placement;
  state->state_planes_ = policy::MakeStatePlanes(layout, plan);
  const std::vector<policy::NamedBytes> sizes =
      policy::HostSegments(layout, plan);
  for (shm::SegmentKind kind : kKinds) {
    const absl::string_view name = shm::SegmentKindName(kind);
    const uint64_t bytes = policy::SegmentBytes(sizes, std::string(name));
    if (bytes == 0) continue;
    // A failure here drops `state` and with it every segment made so far.
    SDP_ASSIGN_OR_RETURN(shm::Segment segment,
                         shm::Segment::Create(kind, bytes, job,
                                              [&](const shm::Mapping& mapping) {
                                                state->Place(kind, mapping);
                                              }));
    state->mappings_[static_cast<size_t>(kind)] = segment.mapping().data();
    state->segments_.push_back(std::move(segment));
  }

  shm::WordsHeader header = {};
  header.world_size = plan.ranks;
  header.units = layout.units.size();
  header.buckets = state->schedule_.buckets.size();
  header.rows = policy::ReportedRows(layout);
  header.state_layout_hash = layout.hash;
  header.plan_hash = policy::PlanHash(plan);
  state->versions_ = shm::Versions::Initialise(
      state->data(shm::SegmentKind::kVersions), header);
  state->reports_ =
      shm::Reports::Initialise(state->data(shm::SegmentKind::kReports), header);
  return state;
}

void HostState::Place(shm::SegmentKind kind,
                      const shm::Mapping& mapping) const {
  if (placement_.node_count() <= 1) return;
  if (kind == shm::SegmentKind::kGrads) {
    for (const PlacedRange& range : PlaceGradients(schedule_, placement_)) {
      BindToNode(mapping, range, placement_);
    }
    return;
  }
  std::vector<std::pair<uint64_t, uint64_t>> planes;  // offset, element bytes
  if (kind == shm::SegmentKind::kParams) {
    planes = {{0, 2}};
  } else if (kind == shm::SegmentKind::kState) {
    planes = {
        {state_planes_.lo, 2}, {state_planes_.m, 4}, {state_planes_.v, 4}};
    if (state_planes_.reduced != state_planes_.bytes) {
      planes.push_back({state_planes_.reduced, 2});
    }
  }
  for (const auto& [offset, element_bytes] : planes) {
    for (const PlacedRange& range :
         PlacePlane(layout_, placement_, offset, element_bytes)) {
      BindToNode(mapping, range, placement_);
    }
  }
}

PlaneSpan HostState::planes(int unit, uint64_t begin, uint64_t count) const {
  const model::Unit& u = layout_.units[unit];
  SDP_CHECK(begin + count <= u.count, "range outside the unit");
  const uint64_t at = u.plane_offset + begin;
  char* state = data(shm::SegmentKind::kState);
  return {
      .hi = reinterpret_cast<bf16*>(data(shm::SegmentKind::kParams)) + at,
      .lo = reinterpret_cast<int16_t*>(state + state_planes_.lo) + at,
      .m = reinterpret_cast<float*>(state + state_planes_.m) + at,
      .v = reinterpret_cast<float*>(state + state_planes_.v) + at,
      .count = count,
  };
}

const bf16* HostState::grad_chunk(int rank, uint64_t chunk_number) const {
  return reinterpret_cast<const bf16*>(
      data(shm::SegmentKind::kGrads) +
      schedule_.slot_offset_bytes(rank, chunk_number));
}

bf16* HostState::reduced(int unit, uint64_t begin) const {
  if (state_planes_.reduced == state_planes_.bytes) return nullptr;
  return reinterpret_cast<bf16*>(data(shm::SegmentKind::kState) +
                                 state_planes_.reduced) +
         layout_.units[unit].plane_offset + begin;
}

}  // namespace slidedp::hostd
