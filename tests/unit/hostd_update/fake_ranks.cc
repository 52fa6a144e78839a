#include "tests/unit/hostd_update/fake_ranks.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <random>

#include "common/base/backoff.h"
#include "common/base/check.h"
#include "common/base/clock.h"
#include "hostd/store/split.h"

namespace slidedp::hostd {
namespace {

// Odd sizes everywhere. The units lie close together, so that a write past a
// unit's end meets its neighbour.
model::StateLayout SmallLayout(const JobOptions& options) {
  model::ModelConfig config;
  config.family = model::Family::kQwen3;
  config.hidden = 24;
  config.layers = 2;
  config.heads = 3;
  config.kv_heads = 1;
  config.head_dim = 10;
  config.intermediate = 37;
  config.vocab = 91;
  config.max_position = 64;
  config.rms_eps = 1e-6;
  config.tied = options.tied;
  config.qk_norm = true;
  config.window.assign(config.layers, 0);
  model::StateLayout layout = model::MakeStateLayout(config);
  layout.plane_elements = 0;
  for (model::Unit& unit : layout.units) {
    unit.plane_offset = layout.plane_elements;
    layout.plane_elements += unit.count;
  }
  SDP_CHECK(model::ApplyRules(options.rules, layout).ok(), "rules");
  return layout;
}

// Which rows the ranks use; the others' gradients become zero.
void ChooseRows(const model::StateLayout& layout, const JobOptions& options,
                std::mt19937& random, StepScript& step) {
  const uint64_t rows = policy::ReportedRows(layout);
  step.used_rows.assign(options.ranks,
                        std::vector<uint64_t>(shm::RowWords(rows)));
  if (rows == 0) return;
  const model::Tensor& table = layout.units[0].tensor(model::Role::kEmbedding);
  const uint64_t width = table.count / rows;
  for (uint64_t row = 0; row < rows; ++row) {
    const uint64_t bit = uint64_t{1} << (row % 64);
    if (static_cast<int>(random() % 100) < options.used_rows_percent) {
      step.used_rows[random() % options.ranks][row / 64] |= bit;
      step.used_rows[random() % options.ranks][row / 64] |= bit;
      continue;
    }
    for (auto& units : step.gradients) {
      std::fill_n(units[0].begin() + table.offset + row * width, width, 0);
    }
  }
}

// What ranks don't write of a chunk of the embedding is no number.
void Unwrite(const Job& job, uint64_t step, const policy::GradChunk& chunk,
             bf16* values) {
  const model::StateLayout& layout = job.state->layout();
  if (chunk.unit != layout.embedding_unit() ||
      !policy::DrainsUsedRows(layout, job.state->plan())) {
    return;
  }
  const model::Tensor& table = layout.units[0].tensor(model::Role::kEmbedding);
  const uint64_t width = table.count / policy::ReportedRows(layout);
  for (uint64_t i = 0; i < chunk.count; ++i) {
    const uint64_t row = (chunk.begin + i) / width;
    bool used = false;
    for (const auto& words : job.script[step].used_rows) {
      used |= row / 64 < words.size() && (words[row / 64] >> (row % 64) & 1);
    }
    if (!used) values[i] = 0xffff;
  }
}

}  // namespace

Job::Job(const JobOptions& o, uint32_t seed) : options(o) {
  const model::StateLayout layout = SmallLayout(o);
  policy::Plan plan;
  plan.ranks = o.ranks;
  plan.embedding.grads = plan.head.grads = o.route;
  plan.decoder.grads = o.decoder_route.value_or(o.route);
  plan.update_mode = o.mode;
  plan.d2h_chunk_bytes = plan.h2d_chunk_bytes = o.chunk_bytes;
  plan.own_chunks = o.own_chunks;
  plan.ring_chunks = o.ring_chunks;
  plan.update_threads = o.threads;
  auto created = HostState::Create("test", layout, plan);
  SDP_CHECK(created.ok(), created.status().ToString());
  state = *std::move(created);

  config.lr = 1e-2;
  config.beta1 = 0.9;
  config.beta2 = 0.99;
  config.eps = 1e-8;
  config.weight_decay = 0.1;
  config.schedule = {policy::LrScheduleKind::kLinear, 2, o.steps, 0};
  config.max_grad_norm =
      o.mode != policy::UpdateMode::kEager ? o.max_grad_norm : 0;
  config.threads = o.threads;
  config.slice_elements = o.slice_elements;

  // The same weights and per-rank gradients for every route, chunk size and
  // thread count.
  std::mt19937 random(seed);
  std::normal_distribution<float> weights(0, 0.1f);
  std::uniform_int_distribution<int> units_of_gradient(-100, 100);
  for (size_t u = 0; u < layout.units.size(); ++u) {
    const PlaneSpan planes =
        state->planes(static_cast<int>(u), 0, layout.units[u].count);
    for (uint64_t i = 0; i < planes.count; ++i) {
      SplitFloat(weights(random), planes.hi[i], planes.lo[i]);
    }
  }
  for (uint64_t s = 0; s < o.steps; ++s) {
    StepScript step;
    for (int r = 0; r < o.ranks; ++r) {
      step.loss_sums.push_back(100.0 + 10 * r + static_cast<double>(s));
      std::vector<std::vector<bf16>> units;
      for (const model::Unit& unit : layout.units) {
        // Steps 1 and 3 are below the clip norm.
        const float scale = s % 2 == 1 ? 0x1p-20f : 0x1p-10f;
        std::vector<bf16> g(unit.count);  // zero: padding, and what is frozen
        for (const model::Tensor& tensor : unit.tensors) {
          if (tensor.frozen) continue;
          for (uint64_t i = 0; i < tensor.count; ++i) {
            g[tensor.offset + i] = FloatToBf16Even(
                scale * static_cast<float>(units_of_gradient(random)));
          }
        }
        units.push_back(std::move(g));
      }
      step.gradients.push_back(std::move(units));
    }
    ChooseRows(layout, o, random, step);
    script.push_back(std::move(step));
  }
}

policy::GradRoute Job::route(int unit) const {
  return state->plan().routes(state->layout().units[unit].kind).grads;
}

const bf16* Job::Drained(uint64_t step, int rank, int unit) const {
  const bool own = route(unit) == policy::GradRoute::kCpu;
  return script[step].gradients[own ? rank : 0][unit].data();
}

FakeRanks::FakeRanks(Job& job, Deviations deviations)
    : job_(job), deviations_(std::move(deviations)) {
  for (int r = 0; r < job.options.ranks; ++r) {
    threads_.emplace_back([this, r] { Run(r); });
  }
}

FakeRanks::~FakeRanks() {
  Abandon();
  Join();
}

bool FakeRanks::Join() {
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
  return finished_ == job_.options.ranks;
}

bool FakeRanks::Await(const std::function<bool()>& ready) {
  Backoff backoff;
  while (!ready()) {
    if (abandoned_) return false;
    backoff.Pause();
  }
  return true;
}

void FakeRanks::Run(int rank) {
  for (uint64_t step = job_.config.first_step; step < job_.options.steps;
       ++step) {
    if (!RunStep(rank, step)) return;
  }
  ++finished_;
}

bool FakeRanks::RunStep(int rank, uint64_t step) {
  HostState& state = *job_.state;
  const StepScript& script = job_.script[step];
  shm::Reports& reports = state.reports();
  shm::StepReport& report = reports.step(rank, step);

  // The host thread enqueues a step ahead of the device.
  if (step > 0 && !Await([&] {
        return state.versions().param_version(0).load(
                   std::memory_order_acquire) >= step - 1;
      })) {
    return false;
  }
  report.valid_tokens = script.valid_tokens;
  report.begin_ns = MonotonicNs();
  std::copy(script.used_rows[rank].begin(), script.used_rows[rank].end(),
            reports.used_rows(rank, step));
  if (deviations_.before_begun && !deviations_.before_begun(rank, step)) {
    return false;
  }
  report.begun.value.store(step + 1, std::memory_order_release);

  // Forward.
  uint64_t unit_begin = 0;
  for (size_t u = 0; u < state.layout().units.size(); ++u) {
    if (!Await([&] {
          return state.versions().param_version(u).load(
                     std::memory_order_acquire) >= step;
        })) {
      return false;
    }
    // Read as a delivery would: an element written later is a race.
    const PlaneSpan planes =
        state.planes(static_cast<int>(u), 0, state.layout().units[u].count);
    uint64_t torn = 0;
    for (uint64_t i = 0; i < planes.count; ++i) {
      const bf16 seen = planes.hi[i];
      if (!job_.versions.empty()) {
        torn += seen != job_.versions[step][unit_begin + i];
      }
    }
    unit_begin += planes.count;
    torn_elements_ += torn;
    if (u > 0) continue;
    if (deviations_.before_embedded &&
        !deviations_.before_embedded(rank, step)) {
      return false;
    }
    report.embedded.value.store(step + 1, std::memory_order_release);
  }
  report.loss_sum = script.loss_sums[rank];
  report.loss_ready.value.store(step + 1, std::memory_order_release);

  // Backward.
  const policy::GradSchedule& schedule = state.grad_schedule();
  const std::vector<policy::GradChunk>& chunks = schedule.chunks[rank];
  int bucket = -1;
  for (uint64_t i = 0; i < chunks.size(); ++i) {
    const policy::GradChunk& chunk = chunks[i];
    const bf16* values = job_.Drained(step, rank, chunk.unit);
    if (chunk.bucket != bucket) {
      bucket = chunk.bucket;
      double square_norm = 0;  // of all that this rank drains of the bucket
      for (const policy::GradChunk& other : chunks) {
        if (other.bucket != bucket) continue;
        for (uint64_t k = 0; k < other.count; ++k) {
          const double g = Bf16ToFloat(values[other.begin + k]);
          square_norm += g * g;
        }
      }
      reports.square_norm(rank, bucket) = square_norm;
    }
    const uint64_t number = step * chunks.size() + i;
    if (!Await([&] {
          return state.versions().grad_free(rank).load(
                     std::memory_order_acquire) >=
                 step * chunks.size() + schedule.FreeBefore(rank, i + 1);
        })) {
      return false;
    }
    bf16* written = const_cast<bf16*>(state.grad_chunk(rank, number));
    std::memcpy(written, values + chunk.begin, chunk.count * sizeof(bf16));
    Unwrite(job_, step, chunk, written);
    if (deviations_.before_chunk && !deviations_.before_chunk(rank, step, i)) {
      return false;
    }
    reports.grad_ready(rank).store(number + 1, std::memory_order_release);
  }

  if (deviations_.before_times && !deviations_.before_times(rank, step)) {
    return false;
  }
  if (rank == deviations_.rank_without_times) return true;
  report.end_ns = MonotonicNs();
  report.deliver_ns = 1 + rank;
  report.compute_ns = 10 + rank;
  report.reduce_ns = 100 + rank;
  report.drain_ns = 1000 + rank;
  report.stall_ns = 10000 + rank;
  report.offload_ns = 100000 + rank;
  report.offload_wait_ns = 1000000 + rank;
  report.times_ready.value.store(step + 1, std::memory_order_release);
  return true;
}

Outcome RunJob(Job& job, Deviations deviations, OnEngineBoundary on_boundary) {
  Outcome outcome;
  std::mutex mutex;
  std::condition_variable changed;
  std::unique_ptr<UpdateEngine> engine;
  UpdateEngine::OnBoundary at_boundary;
  if (on_boundary) {
    // Ranks begin, and steps end, after `engine` is there.
    at_boundary = [&](const Boundary& boundary) {
      return on_boundary(*engine, boundary);
    };
  }
  engine = UpdateEngine::Start(
      *job.state, job.config,
      [&](const StepResult& result) {
        std::lock_guard lock(mutex);
        outcome.results.push_back(result);
        changed.notify_all();
      },
      [&](const absl::Status& status) {
        std::lock_guard lock(mutex);
        outcome.failures.push_back(status);
        changed.notify_all();
      },
      at_boundary);
  FakeRanks ranks(job, std::move(deviations));
  {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] {
      return outcome.results.size() ==
                 job.options.steps - job.config.first_step ||
             !outcome.failures.empty();
    });
  }
  outcome.steps_done = engine->steps_done();
  engine->Stop();
  ranks.Abandon();
  ranks.Join();
  outcome.torn_elements = ranks.torn_elements();
  return outcome;
}

}  // namespace slidedp::hostd
