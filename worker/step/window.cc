#include "worker/step/window.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status.h"
#include "common/base/units.h"

namespace slidedp::step {

using model::UnitKind;

namespace {

// Of the deliver stream. It holds about a thousand; a host that waits for room
// there enqueues no compute. A copy is as many as it has pieces of 4 MiB: on an
// H200 fourteen units of 385 MB, in copies of 16 MiB, made the host wait until
// six of them were there.
constexpr uint64_t kCommandsAhead = 600;
constexpr uint64_t kCommandsPerDelivery = 10;  // beside its copies
constexpr uint64_t kPieceBytes = uint64_t{4} << 20;

}  // namespace

absl::StatusOr<Window> Window::Create(const Inputs& inputs) {
  Window window(inputs);
  SDP_ASSIGN_OR_RETURN(window.stream_, inputs.device->NewStream("deliver"));
  auto add = [&](std::vector<Slot>& slots,
                 const std::string& buffer) -> absl::Status {
    Slot slot;
    slot.data = inputs.buffers->get<bf16>(buffer);
    SDP_CHECK(slot.data != nullptr, buffer);
    SDP_ASSIGN_OR_RETURN(slot.ready, inputs.device->NewEvent());
    SDP_ASSIGN_OR_RETURN(slot.free, inputs.device->NewEvent());
    slots.push_back(std::move(slot));
    return absl::OkStatus();
  };
  const model::Unit& head = inputs.layout->units[inputs.layout->head_unit()];
  SDP_RETURN_IF_ERROR(add(
      window.head_, absl::StrCat("window.", model::UnitKindName(head.kind))));
  for (int i = 0; i < inputs.plan->window_slots; ++i) {
    SDP_RETURN_IF_ERROR(
        add(window.decoder_, absl::StrCat("window.decoder.", i)));
  }
  return window;
}

std::span<Window::Slot> Window::SlotsFor(int unit) {
  if (in_.layout->units[unit].kind == UnitKind::kDecoder) return decoder_;
  SDP_CHECK(unit == in_.layout->head_unit(), "a unit that is read in place");
  return head_;
}

Window::Slot* Window::Find(const Visit& visit) {
  if (in_.resident) return &SlotOf(visit.unit);
  for (Slot& slot : SlotsFor(visit.unit)) {
    if (slot.unit == visit.unit && slot.step == visit.step) return &slot;
  }
  return nullptr;
}

Window::Slot& Window::SlotOf(int unit) {
  const std::span<Slot> slots = SlotsFor(unit);
  const int64_t layer = in_.layout->units[unit].layer;
  return slots[std::max<int64_t>(layer, 0) % slots.size()];
}

bf16* Window::slot_data(int unit) { return SlotOf(unit).data; }

absl::Status Window::Rehearse() {
  if (in_.resident) return absl::OkStatus();
  const int units = static_cast<int>(in_.layout->units.size());
  for (int unit = 0; unit < units; ++unit) {
    const model::Unit& u = in_.layout->units[unit];
    if (u.kind != UnitKind::kDecoder && unit != in_.layout->head_unit()) {
      continue;
    }
    // Each slot once.
    if (u.layer >= std::ssize(decoder_)) continue;
    SDP_RETURN_IF_ERROR(Bring(unit, slot_data(unit)));
  }
  return in_.device->Synchronize(*stream_);
}

absl::Status Window::Advance(std::span<const Visit> upcoming) {
  uint64_t commands = 0;
  for (size_t i = 0; i < upcoming.size(); ++i) {
    const model::Unit& unit = in_.layout->units[upcoming[i].unit];
    commands += kCommandsPerDelivery +
                CeilDiv(unit.count * sizeof(bf16),
                        std::min(in_.plan->h2d_chunk_bytes, kPieceBytes));
    if (i >= 2 && commands > kCommandsAhead) return absl::OkStatus();
    if (Find(upcoming[i]) != nullptr) continue;
    Slot* taken = nullptr;
    for (Slot& slot : SlotsFor(upcoming[i].unit)) {
      const bool wanted_sooner =
          slot.held ||
          std::any_of(
              upcoming.begin(), upcoming.begin() + i, [&](const Visit& visit) {
                return slot.unit == visit.unit && slot.step == visit.step;
              });
      if (!wanted_sooner &&
          (taken == nullptr || slot.released < taken->released)) {
        taken = &slot;
      }
    }
    if (taken == nullptr) {
      SDP_CHECK(i > 0, "no slot for the next visit");
      return absl::OkStatus();
    }
    SDP_RETURN_IF_ERROR(Deliver(upcoming[i], *taken));
  }
  return absl::OkStatus();
}

absl::Status Window::Deliver(const Visit& visit, Slot& slot) {
  device::Device& device = *in_.device;
  slot.unit = visit.unit;
  slot.step = visit.step;
  SDP_RETURN_IF_ERROR(in_.times->Begin(Lane::kDeliverWait, visit.step,
                                       {"wait for a version", visit.unit},
                                       *stream_));
  SDP_RETURN_IF_ERROR(device.WaitWord(&in_.versions.param_version(visit.unit),
                                      visit.step, *stream_));
  SDP_RETURN_IF_ERROR(in_.times->End(Lane::kDeliverWait, visit.step, *stream_));
  SDP_RETURN_IF_ERROR(in_.times->Begin(Lane::kDeliverWait, visit.step,
                                       {"wait for a window slot", visit.unit},
                                       *stream_));
  SDP_RETURN_IF_ERROR(device.Wait(*slot.free, *stream_));
  SDP_RETURN_IF_ERROR(in_.times->End(Lane::kDeliverWait, visit.step, *stream_));
  SDP_RETURN_IF_ERROR(in_.times->Begin(Lane::kDeliver, visit.step,
                                       {"deliver", visit.unit}, *stream_));
  SDP_RETURN_IF_ERROR(Bring(visit.unit, slot.data));
  SDP_RETURN_IF_ERROR(in_.times->End(Lane::kDeliver, visit.step, *stream_));
  return device.Record(*slot.ready, *stream_);
}

absl::Status Window::Bring(int unit_number, bf16* to) {
  device::Device& device = *in_.device;
  const model::Unit& unit = in_.layout->units[unit_number];
  const bool sharded =
      in_.collective != nullptr &&
      in_.plan->routes(unit.kind).params == policy::ParamRoute::kSharded;
  const uint64_t shard =
      sharded ? policy::ShardElements(unit.count, in_.plan->ranks) : unit.count;
  const uint64_t begin = std::min(shard * (sharded ? in_.rank : 0), unit.count);
  const uint64_t end = std::min(begin + shard, unit.count);
  const bf16* source = in_.params->at<bf16>(0) + unit.plane_offset;
  const uint64_t chunk = in_.plan->h2d_chunk_bytes / sizeof(bf16);
  for (uint64_t at = begin; at < end; at += chunk) {
    const uint64_t count = std::min(chunk, end - at);
    SDP_RETURN_IF_ERROR(
        device.Copy(to + at, source + at, count * sizeof(bf16), *stream_));
  }
  if (!sharded) return absl::OkStatus();
  return in_.collective->AllGather(to, shard * sizeof(bf16), *stream_);
}

absl::StatusOr<const bf16*> Window::Use(const Visit& visit,
                                        device::Stream& compute) {
  Slot* slot = Find(visit);
  SDP_CHECK(slot != nullptr, "unit used before its delivery was begun");
  slot->held = true;
  SDP_RETURN_IF_ERROR(in_.device->Wait(*slot->ready, compute));
  return slot->data;
}

absl::Status Window::Release(const Visit& visit, device::Stream& compute) {
  Slot* slot = Find(visit);
  SDP_CHECK(slot != nullptr && slot->held, "release of a unit not in use");
  slot->held = false;
  slot->released = ++releases_;
  return in_.device->Record(*slot->free, compute);
}

}  // namespace slidedp::step
