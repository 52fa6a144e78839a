#include "tests/bench/host_unit.h"

#include <algorithm>

#include "common/base/status.h"
#include "common/base/units.h"
#include "common/model/shapes.h"
#include "hostd/store/random_weights.h"
#include "hostd/update/adamw.h"

namespace slidedp::bench {
namespace {

// Threads' ranges begin at multiples of this.
constexpr uint64_t kBlockElements = 1024;

// body(begin, end) on equal ranges of [0, count), multiples of a block.
void ForThreads(int threads, uint64_t count,
                const std::function<void(uint64_t, uint64_t)>& body) {
  const uint64_t blocks = CeilDiv(count, kBlockElements);
  auto edge = [&](int thread) {
    return std::min(count, blocks * thread / threads * kBlockElements);
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) {
    others.emplace_back([&, i] { body(edge(i), edge(i + 1)); });
  }
  body(edge(0), edge(1));
  for (std::thread& thread : others) thread.join();
}

}  // namespace

absl::StatusOr<std::unique_ptr<HostUnit>> HostUnit::Create(
    const UnitOptions& options, int threads) {
  model::Shape shape = *model::FindShape("qwen2.5-72b");
  shape.hidden = options.hidden;
  shape.intermediate = options.intermediate;
  shape.heads = std::max<int64_t>(8, options.hidden / shape.head_dim);
  shape.family = model::Family::kLlama;  // without biases
  shape.layers = 1;
  shape.vocab = 256;
  SDP_ASSIGN_OR_RETURN(
      const model::ModelConfig config,
      model::ParseModelConfig(model::ConfigJson(shape), "shape"));
  policy::Problem problem;
  problem.config = config;
  problem.sequence_length = 1;
  problem.batch_size = 1;
  problem.micro_batch_size = 1;
  problem.clipping = false;
  SDP_ASSIGN_OR_RETURN(const policy::Plan plan, policy::MakePlan(problem));
  std::unique_ptr<HostUnit> unit(new HostUnit);
  const model::StateLayout layout = model::MakeStateLayout(config);
  SDP_ASSIGN_OR_RETURN(unit->state_,
                       hostd::HostState::Create("bench", layout, plan));
  unit->unit_ = layout.decoder_unit(0);
  unit->count_ = layout.units[unit->unit_].count;
  for (const shm::Segment& segment : unit->state_->segments()) {
    if (segment.kind() != shm::SegmentKind::kParams) continue;
    SDP_ASSIGN_OR_RETURN(const UniqueFd fd, segment.WorkerFd());
    SDP_ASSIGN_OR_RETURN(unit->params_,
                         shm::Mapping::Map(fd.get(), segment.bytes(),
                                           shm::Access::kReadOnly, "params"));
  }
  unit->hi_ = unit->params_.at<bf16>(layout.units[unit->unit_].plane_offset *
                                     sizeof(bf16));
  SDP_RETURN_IF_ERROR(hostd::FillRandomParameters(1, threads, *unit->state_));
  unit->gradients_.resize(unit->count_);
  ForThreads(threads, unit->count_, [&](uint64_t begin, uint64_t end) {
    for (uint64_t i = begin; i < end; ++i) {
      // Of both signs, 2^-10 to 2^-9.
      unit->gradients_[i] =
          static_cast<bf16>(0x3a80u | (i * 0x9e37u & 0x7fu) | (i & 1u) << 15);
    }
  });
  unit->Update(threads);  // moments are not zero
  return unit;
}

void HostUnit::UpdateRange(uint64_t begin, uint64_t end) {
  const hostd::AdamWStep step = hostd::MakeAdamWStep(
      /*lr=*/1e-6, /*beta1=*/0.9, /*beta2=*/0.999, /*eps=*/1e-8,
      /*weight_decay=*/0.0, /*t=*/1000, /*grad_scale=*/1.0);
  hostd::AdamWUpdate(planes(begin, end - begin), gradients_.data() + begin,
                     /*decay=*/true, step);
}

void HostUnit::Update(int threads) {
  ForThreads(threads, count_,
             [&](uint64_t begin, uint64_t end) { UpdateRange(begin, end); });
}

HostUnit::Background::Background(HostUnit& unit, int threads) {
  const uint64_t blocks = CeilDiv(unit.count_, kBlockElements);
  for (int i = 0; i < threads; ++i) {
    threads_.emplace_back([&unit, this, i, threads, blocks] {
      const uint64_t begin = blocks * i / threads * kBlockElements;
      const uint64_t end =
          std::min(unit.count_, blocks * (i + 1) / threads * kBlockElements);
      constexpr uint64_t kPiece = 256 * kBlockElements;
      for (uint64_t at = begin; !stop_.load(std::memory_order_relaxed);) {
        const uint64_t next = std::min(end, at + kPiece);
        unit.UpdateRange(at, next);
        updated_ += next - at;
        at = next == end ? begin : next;
      }
    });
  }
}

HostUnit::Background::~Background() {
  stop_ = true;
  for (std::thread& thread : threads_) thread.join();
}

}  // namespace slidedp::bench
