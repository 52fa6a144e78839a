// One job's authoritative state: the segments and the split planes in them
// (architecture section 3). Only hostd's update workers and its loader write
// the planes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/bf16.h"
#include "common/model/layout.h"
#include "common/model/source.h"
#include "common/shm/segment.h"
#include "common/shm/words.h"
#include "hostd/store/placement.h"
#include "policy/plan.h"

namespace slidedp::hostd {

// A range of the planes. Pointers into the segments.
struct PlaneSpan {
  bf16* hi;
  int16_t* lo;
  float* m;
  float* v;
  uint64_t count;
};

class HostState {
 public:
  // Reserves every segment of policy::HostSegments, of those sizes; all of them
  // or none. Planes are zero, versions 0.
  // Pages go to the nodes of the placement. Without one, or with one node, the
  // kernel chooses.
  static absl::StatusOr<std::unique_ptr<HostState>> Create(
      const std::string& job, const model::StateLayout& layout,
      const policy::Plan& plan, const Placement& placement = {});

  const model::StateLayout& layout() const { return layout_; }
  const policy::Plan& plan() const { return plan_; }
  const policy::GradSchedule& grad_schedule() const { return schedule_; }
  const Placement& placement() const { return placement_; }
  shm::Versions& versions() { return versions_; }
  shm::Reports& reports() { return reports_; }
  // Elements [begin, begin + count) of the unit.
  PlaneSpan planes(int unit, uint64_t begin, uint64_t count) const;
  // The chunk with this number in the rank's ring.
  const bf16* grad_chunk(int rank, uint64_t chunk_number) const;
  // Sums of the `cpu` route; null in eager mode and without that route.
  bf16* reduced(int unit, uint64_t begin) const;
  const std::vector<shm::Segment>& segments() const { return segments_; }

 private:
  HostState() : versions_(nullptr), reports_(nullptr, 0, 0) {}
  // Binds the mapping's ranges that have a place, before they have pages.
  void Place(shm::SegmentKind kind, const shm::Mapping& mapping) const;
  char* data(shm::SegmentKind kind) const {
    return static_cast<char*>(mappings_[static_cast<size_t>(kind)]);
  }

  model::StateLayout layout_;
  policy::Plan plan_;
  policy::GradSchedule schedule_;
  Placement placement_;
  policy::StatePlanes state_planes_;
  std::vector<shm::Segment> segments_;
  void* mappings_[7] = {};  // by SegmentKind
  shm::Versions versions_;
  shm::Reports reports_;
};

// Of the source's tensors; written while they are read.
struct LoadProgress {
  std::atomic<uint64_t> done_bytes = 0, all_bytes = 0;
};

// Reads every tensor of the layout into the planes (moments stay zero) through
// the source's descriptors, in pieces: peak extra memory is a few MiB. A weight
// that the planes can't hold is an error that names tensor and element. An
// lm_head in a tied model's files must equal the embedding. The source has
// passed ValidateSource. Uses plan().update_threads threads; no worker may
// have the segments yet. Cancelled soon after `stop`, if given, becomes true.
absl::Status LoadParameters(const model::TensorSource& source, HostState& state,
                            const std::atomic<bool>* stop = nullptr,
                            LoadProgress* progress = nullptr);

// Writes every trained tensor at its source's place into `files` (one per
// source file), in the source's dtype: BF16 = the hi plane, F32 = exact, F16 =
// nearest even, saturated (a warning names the tensor). A tied model's lm_head
// is written where the source has one. Returns the warnings. The planes must
// not change meanwhile. `stop` as above: the files are then of no use.
absl::StatusOr<std::vector<std::string>> WriteParameters(
    const model::TensorSource& source, const HostState& state,
    const std::vector<int>& files, const std::atomic<bool>* stop = nullptr);

}  // namespace slidedp::hostd
