// Where a layer's activations lie, and their way to pinned host memory and
// back. Each layer's plan says which parts of what it keeps of a micro-batch
// are staged (policy::ActivationLayout): those lie in a device slot only while
// compute writes or reads them.
//
// Forward fills a slot, the activation stream copies it to the host, and the
// slot is free for the micro-batch that comes so many slots later. Backward
// reads slots that the stream has filled again, as far ahead as there are
// slots. Compute and stream meet through events: a slot that is not free yet
// holds compute up (backpressure), the host never. A layer's input is written
// by the layer before it; its slots are one for each micro-batch and then the
// plan's stage_slots, so that it stays until the layer itself has read it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/device/device.h"
#include "common/model/config.h"
#include "common/model/layout.h"
#include "policy/activations.h"
#include "worker/step/buffers.h"
#include "worker/step/lane_times.h"

namespace slidedp::step {

enum class Pass { kForward, kBackward };

// One micro-batch of one layer.
struct Piece {
  int64_t layer;
  int64_t micro_batch;
};

class Activations {
 public:
  struct Inputs {
    device::Device* device;
    const model::ModelConfig* config;
    const model::StateLayout* layout;
    const policy::Plan* plan;
    const Buffers* buffers;
    LaneTimes* times;
  };
  static absl::StatusOr<Activations> Create(const Inputs& inputs);
  // The most spans that a step of the plan has in each of its two lanes.
  static int64_t Spans(const model::ModelConfig& config,
                       const policy::Plan& plan);

  // Where the part (policy::kParts) is in this pass, between Begin and End of
  // the piece, an input from the layer before on; null if it is not kept. The
  // head's input is that of layer config.layers.
  void* at(const Piece& piece, int part, Pass pass) const;

  // Before the inputs of layer 0 are written.
  absl::Status Settle(device::Stream& compute);
  // Around what compute does for a piece, after the inputs of layer 0 have been
  // written: forward in ascending order of layers, backward in descending order
  // as far as it goes, micro-batches ascending in both.
  absl::Status Begin(const Piece& piece, Pass pass, uint64_t step,
                     device::Stream& compute);
  absl::Status End(const Piece& piece, Pass pass, uint64_t step,
                   device::Stream& compute);
  // Between the passes: begins to bring back what backward needs first.
  absl::Status Turn(uint64_t step, device::Stream& compute);

  // Copies a piece out and in again, with whatever lies there, and waits.
  absl::Status Rehearse();

 private:
  // The slots of staged inputs, or of all other staged parts.
  struct Ring {
    std::vector<int64_t> layers;  // those that stage something, ascending
    std::vector<int64_t> order;   // of a layer among them; -1: not one
    char* data = nullptr;
    uint64_t slot_bytes = 0;
    // By slot: the stream's last copy from or to it.
    std::vector<std::unique_ptr<device::Event>> moved;
    uint64_t loads = 0;  // begun in this backward pass
  };

  explicit Activations(const Inputs& inputs) : in_(inputs) {}
  absl::Status AddRing(bool inputs, uint64_t slots, uint64_t slot_bytes,
                       char* data);
  Ring& RingOf(int part) { return rings_[part == policy::kInputPart ? 1 : 0]; }
  const Ring& RingOf(int part) const {
    return rings_[part == policy::kInputPart ? 1 : 0];
  }
  bool Has(const Ring& ring, int64_t layer) const;
  // Number of the piece in the ring's order of the pass, from 0.
  uint64_t Number(const Ring& ring, const Piece& piece, Pass pass) const;
  // The inverse, backward.
  Piece PieceAt(const Ring& ring, uint64_t number) const;
  char* SlotOf(const Ring& ring, uint64_t number) const;
  device::Event& Moved(const Ring& ring, uint64_t number) const;

  // The slot of the piece is filled with what compute has written so far.
  absl::Status Store(Ring& ring, const Piece& piece, uint64_t step);
  // Fills the slot of the ring's next piece; what compute has read so far may
  // be overwritten.
  absl::Status LoadNext(Ring& ring, uint64_t step);
  // The stream waits for what is enqueued on compute.
  absl::Status Follow(device::Stream& compute);
  enum class Way { kToHost, kToDevice };
  absl::Status Move(const Ring& ring, const Piece& piece, char* slot, Way way);

  Inputs in_;
  policy::ActivationLayout layout_;
  std::array<char*, policy::kParts> resident_;
  char *pool_ = nullptr, *rest_ = nullptr;
  std::array<Ring, 2> rings_;
  std::unique_ptr<device::Event> passed_;   // compute, at the latest Follow
  std::unique_ptr<device::Event> settled_;  // the stream, at the latest Settle
  std::unique_ptr<device::Stream> stream_;  // null: nothing is staged
};

}  // namespace slidedp::step
