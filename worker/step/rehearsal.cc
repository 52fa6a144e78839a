// Everything a step does, once, before the first wait for a word: whatever the
// device or a library loads, plans or allocates at a first use happens here.
#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

#include "common/base/bf16.h"
#include "common/base/status.h"
#include "common/device/accelerator.h"
#include "worker/step/trainer_impl.h"
#include "worker/step/unit_weights.h"

namespace slidedp::step {
namespace {

using model::Role;

// Libraries choose kernels by the alignment of addresses, up to this.
constexpr uintptr_t kAlignment = 16;

uint64_t AlignmentOf(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kAlignment;
}

// Values like those of weights and activations, for `count` elements.
std::vector<bf16> Noise(size_t count) {
  std::vector<bf16> values(count);
  uint64_t state = 0;
  for (bf16& value : values) {
    state = state * 0x5851f42d4c957f2du + 0x14057b7ef767814fu;
    value = FloatToBf16Even(
        static_cast<float>(static_cast<int32_t>(state >> 32)) * 0x1p-36f);
  }
  return values;
}

// What tells the calls of one pass through a layer from those of another.
using Likeness = std::vector<uint64_t>;

void Append(const model::Unit& unit, Likeness& likeness) {
  for (const model::Tensor& tensor : unit.tensors) {
    likeness.push_back(tensor.count);
    likeness.push_back(tensor.offset % kAlignment);
    likeness.push_back(tensor.frozen);
  }
}

}  // namespace

absl::Status TrainerImpl::Warm() {
  if (!in_.warm_up) return absl::OkStatus();
  SDP_RETURN_IF_ERROR(in_.warm_up([this] { return Rehearse(); }));
  if (in_.device->kind() != device::Kind::kCuda) return absl::OkStatus();
  return device::CheckAcceleratorStreams(*in_.device);
}

absl::Status TrainerImpl::Rehearse() {
  FillPseudoRandomBatch(0);
  SDP_ASSIGN_OR_RETURN(const StepTokens tokens, UploadBatch(0));
  decoder_->UseDocuments(tokens.first_rows, tokens.offsets);
  SDP_RETURN_IF_ERROR(window_->Rehearse());
  const int64_t all = in_.plan->micro_batches * in_.plan->micro_batch_tokens();
  const int embedding_unit = in_.layout->embedding_unit();
  const UnitWeights embedding(unit(embedding_unit), nullptr,
                              gradients_->accumulator(embedding_unit));
  SDP_RETURN_IF_ERROR(ReadEmbedding(tokens));
  SDP_RETURN_IF_ERROR(FillWithNoise());
  SDP_RETURN_IF_ERROR(RehearseLayers());
  SDP_RETURN_IF_ERROR(RehearseHead(tokens));
  if (float* d_table = embedding.d(Role::kEmbedding)) {
    SDP_RETURN_IF_ERROR(in_.ops->EmbeddingBackward(
        tokens.ids, DHidden(0), all, in_.config->hidden, in_.config->vocab,
        d_table, *compute_));
  }
  SDP_RETURN_IF_ERROR(in_.device->Synchronize(*compute_));
  SDP_RETURN_IF_ERROR(activations_->Rehearse());
  SDP_RETURN_IF_ERROR(gradients_->Rehearse());
  return Forget();
}

// What operations read. Algorithms are chosen by their times here, and those
// depend on the values: zeros, which the host's planes may still be, take less
// power than a GPU is allowed.
absl::Status TrainerImpl::FillWithNoise() {
  const std::vector<bf16> noise = Noise(size_t{1} << 20);
  const size_t noise_bytes = noise.size() * sizeof(bf16);
  for (const policy::NamedBytes& item :
       policy::DeviceBuffers(*in_.config, *in_.layout, *in_.plan)) {
    char* data = buffers_.get<char>(item.name);
    const bool read = item.name == "inputs" || item.name == "stage.inputs" ||
                      item.name == "d_hidden" ||
                      (!in_.compute_only && item.name.starts_with("window."));
    if (data == nullptr || !read) continue;
    size_t done = std::min<size_t>(item.bytes, noise_bytes);
    SDP_RETURN_IF_ERROR(in_.device->Copy(data, noise.data(), done, *compute_));
    while (done < item.bytes) {
      const size_t more = std::min<size_t>(done, item.bytes - done);
      SDP_RETURN_IF_ERROR(in_.device->Copy(data + done, data, more, *compute_));
      done += more;
    }
  }
  return in_.device->Synchronize(*compute_);
}

absl::Status TrainerImpl::RehearseLayers() {
  std::set<Likeness> seen;
  for (int64_t layer = 0; layer < in_.config->layers; ++layer) {
    const int u = in_.layout->decoder_unit(layer);
    for (int64_t mb = 0; mb < in_.plan->micro_batches; ++mb) {
      const void* input_again =
          activations_->at({layer, mb}, policy::kInputPart, Pass::kBackward);
      Likeness likeness = {policy::KeptSegments(*in_.config, *in_.plan, layer),
                           static_cast<uint64_t>(in_.config->window[layer]),
                           AlignmentOf(Input(layer, mb)),
                           AlignmentOf(Input(layer + 1, mb)),
                           AlignmentOf(input_again),
                           AlignmentOf(DHidden(mb)),
                           mb > 0};  // adds to what the first one wrote
      Append(unit(u), likeness);
      if (!seen.insert(likeness).second) continue;
      const UnitWeights weights(unit(u), window_->slot_data(u),
                                gradients_->accumulator(u));
      SDP_RETURN_IF_ERROR(decoder_->Forward(layer, mb, weights,
                                            Input(layer, mb),
                                            Input(layer + 1, mb), *compute_));
      SDP_RETURN_IF_ERROR(decoder_->Backward(layer, mb, weights, input_again,
                                             DHidden(mb), Decoder::Ignore,
                                             *compute_));
    }
  }
  return absl::OkStatus();
}

absl::Status TrainerImpl::RehearseHead(const StepTokens& tokens) {
  const int u = in_.layout->head_unit();
  const UnitWeights weights(unit(u), window_->slot_data(u),
                            gradients_->accumulator(u));
  const Role table = in_.layout->tied() ? Role::kEmbedding : Role::kHead;
  const int64_t rows = in_.plan->micro_batch_tokens();
  std::set<Likeness> seen;
  for (int64_t mb = 0; mb < in_.plan->micro_batches; ++mb) {
    void* input = Input(in_.config->layers, mb);
    const bool add = mb > 0;
    if (!seen.insert({AlignmentOf(input), AlignmentOf(DHidden(mb)), add})
             .second) {
      continue;
    }
    SDP_RETURN_IF_ERROR(
        head_->Run({weights.w(Role::kFinalNorm), weights.w(table),
                    weights.d(Role::kFinalNorm), weights.d(table), add},
                   input, tokens.labels + mb * rows, tokens.scale,
                   tokens.loss_sum, DHidden(mb), /*on_logits=*/{}, *compute_));
  }
  return absl::OkStatus();
}

// What a step takes to be zero, or does not write before it reads it.
absl::Status TrainerImpl::Forget() {
  for (const policy::NamedBytes& item :
       policy::DeviceBuffers(*in_.config, *in_.layout, *in_.plan)) {
    void* data = buffers_.get<void>(item.name);
    // "rope" is constant; kept weights are the caller's.
    if (data == nullptr || item.name == "rope" ||
        item.name.starts_with("pinned.") ||
        (in_.compute_only && item.name.starts_with("window."))) {
      continue;
    }
    SDP_RETURN_IF_ERROR(in_.device->FillZero(data, item.bytes, *compute_));
  }
  // The way back from the device, as losses and gradients take it.
  SDP_RETURN_IF_ERROR(in_.device->Copy(buffers_.get<void>("pinned.tokens"),
                                       buffers_.get<void>("scalars"),
                                       sizeof(double), *compute_));
  return in_.device->Synchronize(*compute_);
}

}  // namespace slidedp::step
