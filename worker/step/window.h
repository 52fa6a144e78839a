// The layer window: device slots that hold units' BF16 parameters for as long
// as compute needs them. Embedding and head have a slot of their own; decoder
// units share `window_slots`.
//
// A delivery waits in the deliver stream for the unit's version word, then for
// the slot's last user, and copies the unit whole or, on the sharded route,
// this rank's shard followed by an all-gather. Nothing here blocks the host.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/bf16.h"
#include "common/collective/collective.h"
#include "common/device/device.h"
#include "common/model/layout.h"
#include "common/shm/segment.h"
#include "common/shm/words.h"
#include "policy/plan.h"
#include "worker/step/buffers.h"
#include "worker/step/lane_times.h"

namespace slidedp::step {

// One use of a unit by compute, in the order of the step.
struct Visit {
  int unit;
  uint64_t step;
};

// Slots for decoder units, and one for the head's. An embedding with a head of
// its own has none: its rows are read where they lie (Trainer).
class Window {
 public:
  struct Inputs {
    device::Device* device;
    collective::Collective* collective;  // null with one rank
    const model::StateLayout* layout;
    const policy::Plan* plan;
    int rank;
    const shm::Mapping* params;
    shm::Versions versions;
    const Buffers* buffers;
    LaneTimes* times;
    // Units never leave: slot_data is what the caller wrote there, and nothing
    // is delivered.
    bool resident = false;
  };
  static absl::StatusOr<Window> Create(const Inputs& inputs);

  // Begins the deliveries of upcoming[0], [1], ... as far as slots and, beyond
  // these two, the stream's room for commands allow. A slot is taken only if
  // its unit is not among the visits before the one served. upcoming[0] must be
  // servable.
  absl::Status Advance(std::span<const Visit> upcoming);
  // The unit's elements; `compute` waits until they are there. Advance must
  // have begun their delivery.
  absl::StatusOr<const bf16*> Use(const Visit& visit, device::Stream& compute);
  // Everything that reads the unit has been enqueued on `compute`.
  absl::Status Release(const Visit& visit, device::Stream& compute);

  // Where the unit lies when resident, else in its next rehearsal.
  bf16* slot_data(int unit);
  // Fills every slot as a delivery does, waiting for no word, and waits for the
  // stream.
  absl::Status Rehearse();

  device::Stream& stream() { return *stream_; }

 private:
  struct Slot {
    bf16* data = nullptr;
    int unit = -1;
    uint64_t step = 0;
    bool held = false;      // used, not yet released
    uint64_t released = 0;  // order of releases; lower is older
    std::unique_ptr<device::Event> ready, free;
  };

  explicit Window(const Inputs& inputs) : in_(inputs) {}
  std::span<Slot> SlotsFor(int unit);
  Slot& SlotOf(int unit);  // when resident, or rehearsing
  Slot* Find(const Visit& visit);
  absl::Status Deliver(const Visit& visit, Slot& slot);
  // The unit's elements, by its route.
  absl::Status Bring(int unit, bf16* to);

  Inputs in_;
  std::unique_ptr<device::Stream> stream_;
  std::vector<Slot> decoder_, head_;
  uint64_t releases_ = 0;
};

}  // namespace slidedp::step
