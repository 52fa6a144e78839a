#include "worker/step/activations.h"

#include <algorithm>
#include <utility>

#include "common/base/check.h"
#include "common/base/status.h"

namespace slidedp::step {

using policy::kInputPart;
using policy::kParts;
using policy::PartPlace;

absl::StatusOr<Activations> Activations::Create(const Inputs& inputs) {
  Activations a(inputs);
  const Buffers& buffers = *inputs.buffers;
  a.layout_ = policy::LayOutActivations(*inputs.config, *inputs.plan);
  for (int s = 0; s < policy::kSegments; ++s) {
    a.resident_[s] =
        buffers.get<char>(policy::KeptName(static_cast<policy::Segment>(s)));
  }
  a.resident_[kInputPart] = buffers.get<char>("inputs");
  a.resident_[policy::kNormsPart] = buffers.get<char>("kept.rstd");
  a.pool_ = buffers.get<char>("pinned.activations");
  a.rest_ = buffers.get<char>("kept.rest");
  SDP_RETURN_IF_ERROR(a.AddRing(false, a.layout_.kept_slots,
                                a.layout_.kept_slot_bytes,
                                buffers.get<char>("stage.kept")));
  SDP_RETURN_IF_ERROR(a.AddRing(true, a.layout_.input_slots,
                                a.layout_.input_slot_bytes,
                                buffers.get<char>("stage.inputs")));
  if (a.pool_ == nullptr) return a;
  SDP_ASSIGN_OR_RETURN(a.passed_, inputs.device->NewEvent());
  SDP_ASSIGN_OR_RETURN(a.settled_, inputs.device->NewEvent());
  SDP_ASSIGN_OR_RETURN(a.stream_, inputs.device->NewStream("activation"));
  return a;
}

int64_t Activations::Spans(const model::ModelConfig& config,
                           const policy::Plan& plan) {
  int64_t moves = 0;
  for (const auto& parts : policy::LayOutActivations(config, plan).layers) {
    bool others = false;
    for (int p = 0; p < kParts; ++p) {
      others |= p != kInputPart && parts[p].staged();
    }
    moves += (parts[kInputPart].staged() ? 1 : 0) + (others ? 1 : 0);
  }
  return 2 * moves * plan.micro_batches;
}

absl::Status Activations::AddRing(bool inputs, uint64_t slots,
                                  uint64_t slot_bytes, char* data) {
  Ring& ring = rings_[inputs ? 1 : 0];
  ring.slot_bytes = slot_bytes;
  ring.data = data;
  for (int64_t l = 0; l < in_.config->layers; ++l) {
    bool staged = false;
    for (int p = 0; p < kParts; ++p) {
      staged |= (p == kInputPart) == inputs && layout_.layers[l][p].staged();
    }
    ring.order.push_back(staged ? std::ssize(ring.layers) : -1);
    if (staged) ring.layers.push_back(l);
  }
  SDP_CHECK(ring.layers.empty() || (slots > 0 && data != nullptr),
            "staged activations without slots");
  for (uint64_t i = 0; i < slots; ++i) {
    SDP_ASSIGN_OR_RETURN(auto event, in_.device->NewEvent());
    ring.moved.push_back(std::move(event));
  }
  return absl::OkStatus();
}

bool Activations::Has(const Ring& ring, int64_t layer) const {
  return layer < in_.config->layers && ring.order[layer] >= 0;
}

uint64_t Activations::Number(const Ring& ring, const Piece& piece,
                             Pass pass) const {
  const int64_t order = ring.order[piece.layer];
  const int64_t turn =
      pass == Pass::kForward ? order : std::ssize(ring.layers) - 1 - order;
  return turn * in_.plan->micro_batches + piece.micro_batch;
}

Piece Activations::PieceAt(const Ring& ring, uint64_t number) const {
  const uint64_t m = in_.plan->micro_batches;
  return {ring.layers[ring.layers.size() - 1 - number / m],
          static_cast<int64_t>(number % m)};
}

char* Activations::SlotOf(const Ring& ring, uint64_t number) const {
  return ring.data + number % ring.moved.size() * ring.slot_bytes;
}

device::Event& Activations::Moved(const Ring& ring, uint64_t number) const {
  return *ring.moved[number % ring.moved.size()];
}

void* Activations::at(const Piece& piece, int part, Pass pass) const {
  const uint64_t mb = piece.micro_batch;
  if (piece.layer == in_.config->layers) {
    return resident_[kInputPart] + layout_.head_input_offset +
           mb * layout_.layers[0][kInputPart].bytes;
  }
  const PartPlace& place = layout_.layers[piece.layer][part];
  if (place.bytes == 0) return nullptr;
  if (!place.staged()) {
    return resident_[part] + place.offset + mb * place.bytes;
  }
  const Ring& ring = RingOf(part);
  return SlotOf(ring, Number(ring, piece, pass)) + place.offset;
}

absl::Status Activations::Follow(device::Stream& compute) {
  SDP_RETURN_IF_ERROR(in_.device->Record(*passed_, compute));
  return in_.device->Wait(*passed_, *stream_);
}

absl::Status Activations::Move(const Ring& ring, const Piece& piece, char* slot,
                               Way way) {
  const bool inputs = &ring == &rings_[1];
  const auto copy = [&](char* in_slot, char* home,
                        uint64_t bytes) -> absl::Status {
    if (bytes == 0) return absl::OkStatus();
    return way == Way::kToHost
               ? in_.device->Copy(home, in_slot, bytes, *stream_)
               : in_.device->Copy(in_slot, home, bytes, *stream_);
  };
  for (int p = 0; p < kParts; ++p) {
    const PartPlace& part = layout_.layers[piece.layer][p];
    if ((p == kInputPart) != inputs || !part.staged()) continue;
    const uint64_t mb = piece.micro_batch;
    char* begin = slot + part.offset;
    SDP_RETURN_IF_ERROR(copy(begin,
                             pool_ + part.pool_offset + mb * part.pool_stride,
                             part.host_bytes));
    SDP_RETURN_IF_ERROR(copy(begin + part.host_bytes,
                             rest_ + part.rest_offset + mb * part.rest_stride,
                             part.bytes - part.host_bytes));
  }
  return absl::OkStatus();
}

absl::Status Activations::Store(Ring& ring, const Piece& piece, uint64_t step) {
  const uint64_t number = Number(ring, piece, Pass::kForward);
  SDP_RETURN_IF_ERROR(in_.times->Begin(
      Lane::kActivation, step,
      {"offload", in_.layout->decoder_unit(static_cast<int>(piece.layer))},
      *stream_));
  SDP_RETURN_IF_ERROR(Move(ring, piece, SlotOf(ring, number), Way::kToHost));
  SDP_RETURN_IF_ERROR(in_.times->End(Lane::kActivation, step, *stream_));
  return in_.device->Record(Moved(ring, number), *stream_);
}

absl::Status Activations::LoadNext(Ring& ring, uint64_t step) {
  const uint64_t number = ring.loads;
  if (number == ring.layers.size() * in_.plan->micro_batches) {
    return absl::OkStatus();
  }
  ++ring.loads;
  const Piece piece = PieceAt(ring, number);
  SDP_RETURN_IF_ERROR(in_.times->Begin(
      Lane::kActivation, step,
      {"reload", in_.layout->decoder_unit(static_cast<int>(piece.layer))},
      *stream_));
  SDP_RETURN_IF_ERROR(Move(ring, piece, SlotOf(ring, number), Way::kToDevice));
  SDP_RETURN_IF_ERROR(in_.times->End(Lane::kActivation, step, *stream_));
  return in_.device->Record(Moved(ring, number), *stream_);
}

// After a whole step there is nothing to wait for: compute has used all that
// was moved. Not so after a forward pass alone, or a backward pass that ends at
// the lowest trained layer.
absl::Status Activations::Settle(device::Stream& compute) {
  if (stream_ == nullptr) return absl::OkStatus();
  SDP_RETURN_IF_ERROR(in_.device->Record(*settled_, *stream_));
  return in_.device->Wait(*settled_, compute);
}

absl::Status Activations::Begin(const Piece& piece, Pass pass, uint64_t step,
                                device::Stream& compute) {
  // Forward writes the next layer's input, backward reads its own.
  const Piece input = {piece.layer + (pass == Pass::kForward ? 1 : 0),
                       piece.micro_batch};
  Ring& inputs = RingOf(kInputPart);
  Ring& others = rings_[0];
  if (pass == Pass::kForward && piece.layer == 0 && Has(inputs, 0)) {
    if (piece.micro_batch == 0) SDP_RETURN_IF_ERROR(Follow(compute));
    SDP_RETURN_IF_ERROR(Store(inputs, piece, step));
  }
  if (!Has(others, piece.layer) && !Has(inputs, input.layer)) {
    return absl::OkStatus();
  }
  SDP_RETURN_IF_ERROR(in_.times->Begin(
      Lane::kActivationWait, step,
      {pass == Pass::kForward ? "wait for a slot" : "wait for a reload",
       in_.layout->decoder_unit(static_cast<int>(piece.layer))},
      compute));
  if (Has(others, piece.layer)) {
    SDP_RETURN_IF_ERROR(
        in_.device->Wait(Moved(others, Number(others, piece, pass)), compute));
  }
  if (Has(inputs, input.layer)) {
    SDP_RETURN_IF_ERROR(
        in_.device->Wait(Moved(inputs, Number(inputs, input, pass)), compute));
  }
  return in_.times->End(Lane::kActivationWait, step, compute);
}

absl::Status Activations::End(const Piece& piece, Pass pass, uint64_t step,
                              device::Stream& compute) {
  const Piece input = {piece.layer + (pass == Pass::kForward ? 1 : 0),
                       piece.micro_batch};
  Ring& inputs = RingOf(kInputPart);
  Ring& others = rings_[0];
  const bool moves_others = Has(others, piece.layer);
  const bool moves_input = Has(inputs, input.layer);
  if (!moves_others && !moves_input) return absl::OkStatus();
  SDP_RETURN_IF_ERROR(Follow(compute));
  if (moves_others) {
    SDP_RETURN_IF_ERROR(pass == Pass::kForward ? Store(others, piece, step)
                                               : LoadNext(others, step));
  }
  if (!moves_input) return absl::OkStatus();
  return pass == Pass::kForward ? Store(inputs, input, step)
                                : LoadNext(inputs, step);
}

absl::Status Activations::Turn(uint64_t step, device::Stream& compute) {
  if (stream_ == nullptr) return absl::OkStatus();
  SDP_RETURN_IF_ERROR(Follow(compute));
  size_t most = 0;
  for (Ring& ring : rings_) {
    ring.loads = 0;
    most = std::max(most, ring.moved.size());
  }
  // In turn: a piece may need both.
  for (size_t i = 0; i < most; ++i) {
    for (Ring& ring : rings_) {
      if (i < ring.moved.size()) {
        SDP_RETURN_IF_ERROR(LoadNext(ring, step));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Activations::Rehearse() {
  if (stream_ == nullptr) return absl::OkStatus();
  for (const Ring& ring : rings_) {
    if (ring.layers.empty()) continue;
    const Piece piece = {ring.layers[0], 0};
    SDP_RETURN_IF_ERROR(Move(ring, piece, ring.data, Way::kToHost));
    SDP_RETURN_IF_ERROR(Move(ring, piece, ring.data, Way::kToDevice));
  }
  return in_.device->Synchronize(*stream_);
}

}  // namespace slidedp::step
