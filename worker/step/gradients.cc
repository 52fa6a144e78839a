#include "worker/step/gradients.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/status.h"

namespace slidedp::step {

using collective::DType;
using model::UnitKind;
using policy::GradRoute;
using policy::ReduceDType;

namespace {

constexpr uint64_t kGroupsOfRing = 4;

// Whether the unit's first micro-batch writes this gradient: a matrix's, but a
// table's only where the head is its product.
bool IsWritten(const model::StateLayout& layout, const model::Tensor& tensor) {
  return tensor.shape.size() == 2 &&
         (tensor.role != model::Role::kEmbedding || layout.tied());
}

}  // namespace

absl::StatusOr<Gradients> Gradients::Create(const Inputs& inputs) {
  Gradients g(inputs);
  g.schedule_ = policy::MakeGradSchedule(*inputs.layout, *inputs.plan);
  SDP_ASSIGN_OR_RETURN(g.reduce_, inputs.device->NewStream("reduce"));
  SDP_ASSIGN_OR_RETURN(g.drain_, inputs.device->NewStream("drain"));
  SDP_ASSIGN_OR_RETURN(g.loss_computed_, inputs.device->NewEvent());
  // Two loss sums come first in "scalars".
  g.norms_ = inputs.buffers->get<double>("scalars") + 2;
  if (!inputs.compute_only) {
    g.used_rows_ = inputs.buffers->get<uint64_t>("used_rows");
  }
  const int ranks = inputs.plan->ranks;
  auto add = [&](std::vector<Slot>& slots, const std::string& suffix,
                 bool decoders) -> absl::Status {
    Slot slot;
    slot.sum = inputs.buffers->get<float>(absl::StrCat("gradient.", suffix));
    slot.drain = inputs.buffers->get<bf16>(absl::StrCat("drain.", suffix));
    for (const model::Unit& unit : inputs.layout->units) {
      if ((unit.kind == UnitKind::kDecoder) != decoders) continue;
      const bool sharded =
          inputs.plan->routes(unit.kind).grads == GradRoute::kGpuSharded;
      slot.sum_elements =
          std::max(slot.sum_elements,
                   sharded ? policy::ShardElements(unit.count, ranks) * ranks
                           : unit.count);
    }
    SDP_CHECK(slot.sum != nullptr && slot.drain != nullptr, suffix);
    for (auto* event :
         {&slot.computed, &slot.reduced, &slot.ready, &slot.drained}) {
      SDP_ASSIGN_OR_RETURN(*event, inputs.device->NewEvent());
    }
    slots.push_back(std::move(slot));
    return absl::OkStatus();
  };
  SDP_RETURN_IF_ERROR(add(g.ends_, "ends", false));
  for (int i = 0; i < inputs.plan->grad_slots; ++i) {
    SDP_RETURN_IF_ERROR(add(g.decoder_, absl::StrCat("decoder.", i), true));
  }
  const int units = static_cast<int>(inputs.layout->units.size());
  for (int unit = 0; unit < units; ++unit) {
    g.added_.push_back(g.AddedRanges(unit));
  }
  for (int unit = 0; unit < units; ++unit) {
    // The head is the first of the ends.
    if (inputs.layout->units[unit].kind == UnitKind::kDecoder ||
        unit == inputs.layout->head_unit()) {
      SDP_RETURN_IF_ERROR(g.MakeReady(unit));
    }
  }
  SDP_RETURN_IF_ERROR(inputs.device->Synchronize(*g.reduce_));
  return g;
}

Gradients::Slot& Gradients::SlotOf(int unit) {
  const model::Unit& u = in_.layout->units[unit];
  return u.kind == UnitKind::kDecoder ? decoder_[u.layer % decoder_.size()]
                                      : ends_[0];
}

std::vector<Gradients::Range> Gradients::AddedRanges(int unit) {
  std::vector<Range> ranges;
  uint64_t at = 0;
  const auto add_until = [&](uint64_t end) {
    if (end > at) ranges.push_back({at, end});
  };
  for (const model::Tensor& tensor : in_.layout->units[unit].tensors) {
    if (!IsWritten(*in_.layout, tensor)) continue;
    add_until(tensor.offset);
    at = tensor.offset + tensor.count;
  }
  add_until(SlotOf(unit).sum_elements);
  return ranges;
}

absl::Status Gradients::MakeReady(int unit) {
  Slot& slot = SlotOf(unit);
  for (const Range& range : added_[unit]) {
    SDP_RETURN_IF_ERROR(in_.device->FillZero(
        slot.sum + range.begin, (range.end - range.begin) * sizeof(float),
        *reduce_));
  }
  return in_.device->Record(*slot.ready, *reduce_);
}

int Gradients::Successor(int unit) const {
  const model::StateLayout& layout = *in_.layout;
  if (layout.units[unit].kind == UnitKind::kDecoder) return unit;
  return unit == layout.embedding_unit() ? layout.head_unit()
                                         : layout.embedding_unit();
}

absl::StatusOr<float*> Gradients::Begin(int unit, device::Stream& compute) {
  Slot& slot = SlotOf(unit);
  SDP_RETURN_IF_ERROR(in_.device->Wait(*slot.ready, compute));
  return slot.sum;
}

absl::StatusOr<Gradients::Share> Gradients::Reduce(size_t index, Slot& slot) {
  const policy::GradBucket& bucket = schedule_.buckets[index];
  // So that they have no part in the norm, as if they had no gradient.
  for (const model::Tensor& tensor : in_.layout->units[bucket.unit].tensors) {
    const uint64_t begin = std::max(tensor.offset, bucket.begin);
    const uint64_t end = std::min(tensor.offset + tensor.count, bucket.end);
    if (!tensor.frozen || begin >= end) continue;
    SDP_RETURN_IF_ERROR(in_.device->FillZero(
        slot.sum + begin, (end - begin) * sizeof(float), *reduce_));
  }
  SDP_ASSIGN_OR_RETURN(const Share share, Exchange(bucket, slot));
  if (share.end > share.begin) {
    SDP_RETURN_IF_ERROR(in_.ops->SquaredNorm(
        share.data, static_cast<int64_t>(share.end - share.begin),
        norms_ + index, *reduce_));
  }
  return share;
}

absl::StatusOr<Gradients::Share> Gradients::Exchange(
    const policy::GradBucket& bucket, Slot& slot) {
  const policy::Routes& routes =
      in_.plan->routes(in_.layout->units[bucket.unit].kind);
  collective::Collective* ranks = in_.collective;
  const bool bf16_sums = routes.reduce == ReduceDType::kBf16;
  device::Stream& stream = *reduce_;
  float* sum = slot.sum + bucket.begin;
  const uint64_t count = bucket.end - bucket.begin;
  auto cast = [&](const float* from, uint64_t elements, bf16* to) {
    return in_.ops->CastToBf16(from, static_cast<int64_t>(elements), to,
                               stream);
  };
  // Buckets of a unit lie in its drain buffer side by side.
  bf16* drain = slot.drain + bucket.begin;
  if (ranks == nullptr || routes.grads == GradRoute::kCpu) {
    SDP_RETURN_IF_ERROR(cast(sum, count, drain));
    return Share{bucket.begin, bucket.end, drain};
  }
  if (routes.grads == GradRoute::kGpuRoot) {
    const uint64_t drained = in_.rank == 0 ? count : 0;
    if (bf16_sums) {
      SDP_RETURN_IF_ERROR(cast(sum, count, drain));
      SDP_RETURN_IF_ERROR(ranks->Reduce(drain, count, DType::kBf16, 0, stream));
    } else {
      SDP_RETURN_IF_ERROR(ranks->Reduce(sum, count, DType::kF32, 0, stream));
      if (drained > 0) SDP_RETURN_IF_ERROR(cast(sum, drained, drain));
    }
    return Share{bucket.begin, bucket.begin + drained, drain};
  }
  const int world = in_.plan->ranks;
  const uint64_t shard = policy::ShardElements(count, world);
  const policy::GradShard own = policy::ShardOf(bucket, in_.rank, world);
  if (bf16_sums) {
    SDP_RETURN_IF_ERROR(cast(sum, shard * world, drain));
    SDP_RETURN_IF_ERROR(
        ranks->ReduceScatter(drain, shard, DType::kBf16, stream));
    return Share{own.begin, own.end, slot.drain + own.begin};
  }
  SDP_RETURN_IF_ERROR(ranks->ReduceScatter(sum, shard, DType::kF32, stream));
  drain = slot.drain + bucket.begin / world;
  if (own.end > own.begin) {
    SDP_RETURN_IF_ERROR(cast(slot.sum + own.begin, own.end - own.begin, drain));
  }
  return Share{own.begin, own.end, drain};
}

absl::Status Gradients::Finish(int unit, uint64_t from, uint64_t step,
                               device::Stream& compute) {
  Slot& slot = SlotOf(unit);
  device::Device& device = *in_.device;
  const std::vector<policy::GradBucket>& buckets = schedule_.buckets;
  const auto is_final = [&] {
    return next_bucket_ < buckets.size() &&
           buckets[next_bucket_].unit == unit &&
           buckets[next_bucket_].begin >= from;
  };
  const bool drains = !in_.compute_only && is_final();
  if (!drains && from > 0) return absl::OkStatus();
  SDP_RETURN_IF_ERROR(device.Record(*slot.computed, compute));
  SDP_RETURN_IF_ERROR(device.Wait(*slot.computed, *reduce_));
  if (!drains) return MakeReady(Successor(unit));
  if (buckets[next_bucket_].end == in_.layout->units[unit].count) {
    SDP_RETURN_IF_ERROR(device.Wait(*slot.drained, *reduce_));
  }
  for (; is_final(); ++next_bucket_) {
    SDP_RETURN_IF_ERROR(
        in_.times->Begin(Lane::kReduce, step, {"reduce", unit}, *reduce_));
    SDP_ASSIGN_OR_RETURN(const Share share, Reduce(next_bucket_, slot));
    SDP_RETURN_IF_ERROR(in_.times->End(Lane::kReduce, step, *reduce_));
    SDP_RETURN_IF_ERROR(device.Record(*slot.reduced, *reduce_));
    // Beside compute, which has the next unit at hand.
    if (buckets[next_bucket_].begin == 0) {
      SDP_RETURN_IF_ERROR(MakeReady(Successor(unit)));
    }
    SDP_RETURN_IF_ERROR(Drain(next_bucket_, step, share, slot));
  }
  return absl::OkStatus();
}

absl::Status Gradients::Rehearse() {
  if (in_.compute_only) return absl::OkStatus();
  std::set<std::pair<const float*, uint64_t>> seen;
  for (size_t b = 0; b < schedule_.buckets.size(); ++b) {
    const policy::GradBucket& bucket = schedule_.buckets[b];
    Slot& slot = SlotOf(bucket.unit);
    const uint64_t count = bucket.end - bucket.begin;
    if (!seen.insert({slot.sum + bucket.begin, count}).second) continue;
    SDP_RETURN_IF_ERROR(Reduce(b, slot).status());
  }
  SDP_RETURN_IF_ERROR(in_.device->Synchronize(*reduce_));
  // `used_rows` is zero still: nothing is written.
  for (const policy::GradChunk& chunk : schedule_.chunks[in_.rank]) {
    if (!drains_used_rows(chunk.unit)) continue;
    SDP_RETURN_IF_ERROR(
        CopyUsedRows(chunk, ends_[0].drain, in_.grads->at<bf16>(0)));
    break;
  }
  return in_.device->Synchronize(*drain_);
}

absl::Status Gradients::FetchUsedRows(uint64_t step) {
  const uint64_t words = shm::RowWords(policy::ReportedRows(*in_.layout));
  for (int r = 0; r < in_.plan->ranks; ++r) {
    SDP_RETURN_IF_ERROR(in_.device->WaitWord(
        &in_.reports.step(r, step).begun.value, step + 1, *drain_));
    SDP_RETURN_IF_ERROR(in_.device->Copy(used_rows_ + r * words,
                                         in_.reports.used_rows(r, step),
                                         words * sizeof(uint64_t), *drain_));
  }
  return absl::OkStatus();
}

absl::Status Gradients::CopyUsedRows(const policy::GradChunk& chunk,
                                     const bf16* values, bf16* out) {
  const model::Tensor& table =
      in_.layout->units[chunk.unit].tensor(model::Role::kEmbedding);
  SDP_CHECK(table.offset == 0, "a table that is not its unit's first tensor");
  // Behind the table there is padding, which nobody reads.
  const uint64_t end = std::min(chunk.begin + chunk.count, table.count);
  if (end <= chunk.begin) return absl::OkStatus();
  const uint64_t rows = policy::ReportedRows(*in_.layout);
  return in_.ops->CopyUsedRows(
      {used_rows_, static_cast<int64_t>(shm::RowWords(rows)), in_.plan->ranks},
      static_cast<int64_t>(table.count / rows),
      static_cast<int64_t>(chunk.begin),
      static_cast<int64_t>(end - chunk.begin), values, out, *drain_);
}

absl::Status Gradients::Drain(size_t bucket, uint64_t step, const Share& share,
                              Slot& slot) {
  device::Device& device = *in_.device;
  const int unit = schedule_.buckets[bucket].unit;
  const auto& chunks = schedule_.chunks[in_.rank];
  // While the bucket is still being reduced.
  if (drains_used_rows(unit) && share.end > share.begin) {
    SDP_RETURN_IF_ERROR(FetchUsedRows(step));
  }
  SDP_RETURN_IF_ERROR(device.Wait(*slot.reduced, *drain_));
  SDP_RETURN_IF_ERROR(
      in_.times->Begin(Lane::kDrain, step, {"drain", unit}, *drain_));
  if (share.end > share.begin) {
    SDP_RETURN_IF_ERROR(device.Copy(&in_.reports.square_norm(in_.rank, bucket),
                                    norms_ + bucket, sizeof(double), *drain_));
  }
  size_t end = next_chunk_;
  while (end < chunks.size() &&
         chunks[end].bucket == static_cast<int>(bucket)) {
    ++end;
  }
  // Room is waited for by the group: every wait costs the stream commands.
  const uint64_t group =
      std::max<uint64_t>(1, schedule_.ring[in_.rank] / kGroupsOfRing);
  size_t room_until = next_chunk_;
  for (; next_chunk_ < end; ++next_chunk_) {
    const policy::GradChunk& chunk = chunks[next_chunk_];
    SDP_CHECK(
        chunk.begin >= share.begin && chunk.begin + chunk.count <= share.end,
        "gradient schedule and route disagree");
    const uint64_t number = step * chunks.size() + next_chunk_;
    if (next_chunk_ == room_until) {
      room_until = std::min(end, next_chunk_ + group);
      const uint64_t free = schedule_.FreeBefore(in_.rank, room_until);
      if (free > 0) {
        SDP_RETURN_IF_ERROR(
            WaitForChunks(step * chunks.size() + free, unit, step));
      }
    }
    const bf16* from = share.data + (chunk.begin - share.begin);
    bf16* to =
        in_.grads->at<bf16>(schedule_.slot_offset_bytes(in_.rank, number));
    SDP_RETURN_IF_ERROR(
        drains_used_rows(unit)
            ? CopyUsedRows(chunk, from, to)
            : device.Copy(to, from, chunk.count * sizeof(bf16), *drain_));
    SDP_RETURN_IF_ERROR(device.WriteWord(&in_.reports.grad_ready(in_.rank),
                                         number + 1, *drain_));
  }
  SDP_RETURN_IF_ERROR(in_.times->End(Lane::kDrain, step, *drain_));
  return device.Record(*slot.drained, *drain_);
}

absl::Status Gradients::WaitForChunks(uint64_t freed, int unit, uint64_t step) {
  SDP_RETURN_IF_ERROR(in_.times->Begin(
      Lane::kDrainWait, step, {"wait for free chunks", unit}, *drain_));
  SDP_RETURN_IF_ERROR(
      in_.device->WaitWord(&in_.versions.grad_free(in_.rank), freed, *drain_));
  return in_.times->End(Lane::kDrainWait, step, *drain_);
}

int64_t Gradients::Waits(const model::StateLayout& layout,
                         const policy::Plan& plan, int rank) {
  const policy::GradSchedule schedule = policy::MakeGradSchedule(layout, plan);
  const size_t chunks = schedule.chunks[rank].size();
  return schedule.slots(rank) < chunks ? static_cast<int64_t>(chunks) : 0;
}

absl::Status Gradients::DrainLoss(const double* loss_sum, uint64_t step,
                                  device::Stream& compute) {
  if (in_.compute_only) return absl::OkStatus();
  device::Device& device = *in_.device;
  shm::StepReport& report = in_.reports.step(in_.rank, step);
  next_bucket_ = next_chunk_ = 0;
  SDP_RETURN_IF_ERROR(device.Record(*loss_computed_, compute));
  SDP_RETURN_IF_ERROR(device.Wait(*loss_computed_, *drain_));
  SDP_RETURN_IF_ERROR(
      device.Copy(&report.loss_sum, loss_sum, sizeof(double), *drain_));
  return device.WriteWord(&report.loss_ready.value, step + 1, *drain_);
}

absl::Status Gradients::Synchronize() {
  SDP_RETURN_IF_ERROR(in_.device->Synchronize(*reduce_));
  return in_.device->Synchronize(*drain_);
}

}  // namespace slidedp::step
