#include "tests/local_job/local_job.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/fd.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "common/device/accelerator.h"
#include "hostd/store/split.h"
#include "worker/ops/accelerator_ops.h"

namespace slidedp::testing {
namespace {

constexpr int64_t kDeadlineNs = 60'000'000'000;

// One rank's side of the segments, mapped as a worker maps them.
struct RankMappings {
  shm::Mapping params, grads, versions, reports, exchange;
};

absl::StatusOr<RankMappings> MapAsWorker(const hostd::HostState& state) {
  RankMappings mappings;
  for (const shm::Segment& segment : state.segments()) {
    shm::Mapping* mapping = nullptr;
    shm::Access access = shm::Access::kReadWrite;
    switch (segment.kind()) {
      case shm::SegmentKind::kParams:
        mapping = &mappings.params;
        access = shm::Access::kReadOnly;
        break;
      case shm::SegmentKind::kVersions:
        mapping = &mappings.versions;
        access = shm::Access::kReadOnly;
        break;
      case shm::SegmentKind::kGrads:
        mapping = &mappings.grads;
        break;
      case shm::SegmentKind::kReports:
        mapping = &mappings.reports;
        break;
      case shm::SegmentKind::kExchange:
        mapping = &mappings.exchange;
        break;
      case shm::SegmentKind::kState:
        continue;
    }
    SDP_ASSIGN_OR_RETURN(const UniqueFd fd, segment.WorkerFd());
    SDP_ASSIGN_OR_RETURN(
        *mapping, shm::Mapping::Map(fd.get(), segment.bytes(), access,
                                    shm::SegmentKindName(segment.kind())));
  }
  return mappings;
}

struct Machine {
  std::unique_ptr<device::Device> device;
  std::unique_ptr<ops::Ops> ops;
};

absl::StatusOr<Machine> MakeMachine(const LocalJobOptions& options,
                                    const policy::Plan& plan, int rank) {
  Machine machine;
  if (plan.device == policy::DeviceKind::kCpu) {
    machine.device = device::NewCpuDevice({});
    if (options.wrap_device) {
      machine.device = options.wrap_device(std::move(machine.device));
    }
    machine.ops = ops::NewCpuOps(plan.compute_threads);
    if (options.wrap_ops) {
      machine.ops = options.wrap_ops(std::move(machine.ops));
    }
    return machine;
  }
  if (plan.ranks > 1) {
    return absl::UnimplementedError("a local job on GPUs has one rank");
  }
  SDP_ASSIGN_OR_RETURN(
      machine.device,
      device::NewAccelerator({rank, plan.gpu_memory_limit_bytes}));
  SDP_ASSIGN_OR_RETURN(
      machine.ops, ops::NewAcceleratorOps(*machine.device,
                                          {plan.float32, plan.deterministic}));
  return machine;
}

// Drops the last position of sequences of `length` + 1.
void DropLastPositions(int64_t length, data::StepBatch& batch) {
  SDP_CHECK(batch.ids.size() % (length + 1) == 0, "sequences of another size");
  const size_t sequences = batch.ids.size() / (length + 1);
  for (size_t s = 1; s < sequences; ++s) {
    for (std::vector<int32_t>* values : {&batch.ids, &batch.labels}) {
      const auto from = values->begin() + s * (length + 1);
      std::copy(from, from + length, values->begin() + s * length);
    }
  }
  batch.ids.resize(sequences * length);
  batch.labels.resize(sequences * length);
}

// What the daemon does with the ranks' parts: adds them up, then lets all go
// on.
class Evaluations {
 public:
  explicit Evaluations(const LocalJobOptions& options, int ranks)
      : options_(options), ranks_(ranks) {}

  absl::StatusOr<bool> Take(const step::EvaluationPart& part) {
    std::unique_lock<std::mutex> lock(mutex_);
    loss_sum_ += part.loss_sum;
    valid_tokens_ += part.valid_tokens;
    const size_t turn = results_.size();
    if (++parts_ == ranks_) {
      results_.emplace_back(part.step,
                            loss_sum_ / static_cast<double>(valid_tokens_));
      parts_ = 0;
      loss_sum_ = 0;
      valid_tokens_ = 0;
      changed_.notify_all();
    }
    if (!changed_.wait_for(lock, std::chrono::seconds(60),
                           [&] { return results_.size() > turn; })) {
      return absl::DeadlineExceededError("ranks that do not evaluate");
    }
    return part.step != options_.stop_at_evaluation;
  }
  const std::vector<std::pair<uint64_t, double>>& results() const {
    return results_;
  }

 private:
  const LocalJobOptions& options_;
  const int ranks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int parts_ = 0;
  double loss_sum_ = 0;
  uint64_t valid_tokens_ = 0;
  std::vector<std::pair<uint64_t, double>> results_;
};

absl::Status RunRank(const LocalJobOptions& options,
                     const model::ModelConfig& config,
                     const hostd::HostState& state, const data::Mixture& data,
                     const data::Dataset* eval_dataset,
                     Evaluations& evaluations, int rank) {
  const policy::Plan& plan = state.plan();
  SDP_ASSIGN_OR_RETURN(const RankMappings maps, MapAsWorker(state));
  SDP_ASSIGN_OR_RETURN(const Machine machine, MakeMachine(options, plan, rank));
  std::unique_ptr<collective::Collective> collectives[policy::kCommunicators];
  if (plan.ranks > 1) {
    const uint64_t staging = policy::ExchangeStagingBytes(plan);
    const uint64_t bytes = collective::ExchangeBytes(plan.ranks, staging);
    for (int c = 0; c < policy::kCommunicators; ++c) {
      SDP_ASSIGN_OR_RETURN(
          collectives[c],
          collective::NewShmCollective(*machine.device,
                                       maps.exchange.at<char>(c * bytes), bytes,
                                       rank, plan.ranks, staging, kDeadlineNs));
    }
  }
  step::TrainerInputs inputs;
  inputs.device = machine.device.get();
  inputs.ops = machine.ops.get();
  inputs.param_collective = collectives[0].get();
  inputs.grad_collective = collectives[1].get();
  inputs.config = &config;
  inputs.layout = &state.layout();
  inputs.plan = &plan;
  inputs.rank = rank;
  inputs.mixture = &data;
  inputs.batch.ranks = plan.ranks;
  inputs.batch.batch_size = options.problem.batch_size;
  inputs.batch.micro_batch_size = plan.micro_batch_size;
  inputs.batch.micro_batches = plan.micro_batches;
  inputs.batch.documents_per_sequence = plan.documents_per_sequence;
  inputs.eval.dataset = eval_dataset;
  inputs.eval.sequences = options.eval_sequences;
  inputs.eval.every_steps = options.eval_every_steps;
  inputs.eval.on_part = [&](const step::EvaluationPart& part) {
    return evaluations.Take(part);
  };
  inputs.params = &maps.params;
  inputs.grads = &maps.grads;
  inputs.versions = &maps.versions;
  inputs.reports = &maps.reports;
  step::Hooks hooks = rank == 0 ? options.hooks : step::Hooks{};
  if (options.label_every_position) {
    SDP_CHECK(!hooks.on_batch, "on_batch is taken");
    hooks.on_batch = [length = plan.sequence_length](uint64_t,
                                                     data::StepBatch& batch) {
      DropLastPositions(length, batch);
    };
  }
  if (options.rehearse) {
    inputs.warm_up = [](const std::function<absl::Status()>& rehearsal) {
      return rehearsal();
    };
  }
  SDP_ASSIGN_OR_RETURN(auto trainer,
                       step::Trainer::Create(inputs, std::move(hooks)));
  return trainer->Run(0, options.steps);
}

// Ends every wait of the ranks, after nothing is applied any more: they run on,
// to no effect. (A worker process would exit in the middle of its waits.)
void ReleaseRanks(hostd::HostState& state) {
  const shm::Versions& versions = state.versions();
  for (size_t u = 0; u < state.layout().units.size(); ++u) {
    versions.param_version(u).store(UINT64_MAX, std::memory_order_release);
  }
  for (int r = 0; r < state.plan().ranks; ++r) {
    versions.grad_free(r).store(UINT64_MAX, std::memory_order_release);
  }
}

absl::StatusOr<data::Mixture> OpenData(const LocalJobOptions& options,
                                       int64_t vocab) {
  std::vector<data::Dataset> datasets;
  SDP_ASSIGN_OR_RETURN(
      data::Dataset dataset,
      data::Dataset::Open(options.data,
                          options.problem.sequence_length +
                              (options.label_every_position ? 1 : 0),
                          vocab, options.sequences));
  datasets.push_back(std::move(dataset));
  return data::Mixture::Create(std::move(datasets), {}, options.seed);
}

}  // namespace

absl::StatusOr<LocalJobResult> RunLocalJob(const LocalJobOptions& options) {
  const std::string config_file = absl::StrCat(options.model, "/config.json");
  SDP_ASSIGN_OR_RETURN(const std::string json, ReadFile(config_file, kMiB));
  SDP_ASSIGN_OR_RETURN(const model::ModelConfig config,
                       model::ParseModelConfig(json, config_file));
  policy::Problem problem = options.problem;
  problem.config = config;
  LocalJobResult result;
  SDP_ASSIGN_OR_RETURN(const data::Mixture data,
                       OpenData(options, config.vocab));
  std::optional<data::Dataset> eval_dataset;
  problem.documents_per_sequence = data.documents_per_sequence();
  if (options.eval_sequences > 0) {
    SDP_ASSIGN_OR_RETURN(
        eval_dataset,
        data::Dataset::Open(options.eval_data, problem.sequence_length,
                            config.vocab, options.sequences));
    problem.documents_per_sequence = std::max(
        problem.documents_per_sequence, eval_dataset->documents_per_sequence());
  }
  SDP_ASSIGN_OR_RETURN(result.plan, policy::MakePlan(problem));
  result.layout = model::MakeStateLayout(config);
  SDP_RETURN_IF_ERROR(model::ApplyRules(options.rules, result.layout));
  SDP_ASSIGN_OR_RETURN(auto state, hostd::HostState::Create(
                                       "local", result.layout, result.plan));
  SDP_ASSIGN_OR_RETURN(const model::TensorSource source,
                       model::OpenModelFolder(options.model));
  SDP_RETURN_IF_ERROR(hostd::LoadParameters(source, *state));

  Evaluations evaluations(options, result.plan.ranks);
  const uint64_t steps_to_do =
      options.stop_at_evaluation.value_or(options.steps);

  // The standard library's: the thread sanitizer does not see into absl's.
  std::mutex mutex;
  std::condition_variable changed;
  absl::Status failure;
  std::vector<hostd::StepResult> steps;
  std::unique_ptr<hostd::UpdateEngine> engine;
  if (options.apply_updates) {
    engine = hostd::UpdateEngine::Start(
        *state, options.update,
        [&](const hostd::StepResult& step) {
          std::lock_guard<std::mutex> lock(mutex);
          steps.push_back(step);
          changed.notify_all();
        },
        [&](const absl::Status& status) {
          ReleaseRanks(*state);
          std::lock_guard<std::mutex> lock(mutex);
          failure.Update(status);
          changed.notify_all();
        });
  }
  std::vector<absl::Status> rank_status(result.plan.ranks);
  {
    std::vector<std::jthread> ranks;
    for (int r = 0; r < result.plan.ranks; ++r) {
      ranks.emplace_back([&, r] {
        rank_status[r] =
            RunRank(options, config, *state, data,
                    eval_dataset ? &*eval_dataset : nullptr, evaluations, r);
        if (rank_status[r].ok()) return;
        if (engine != nullptr) engine->Stop();
        ReleaseRanks(*state);
      });
    }
  }
  {
    // Before what it brought about in the ranks.
    std::lock_guard<std::mutex> lock(mutex);
    SDP_RETURN_IF_ERROR(failure);
  }
  for (const absl::Status& status : rank_status) SDP_RETURN_IF_ERROR(status);
  if (engine != nullptr) {
    {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait_for(lock, std::chrono::seconds(60), [&] {
        return steps.size() >= steps_to_do || !failure.ok();
      });
    }
    engine->Stop();
    SDP_RETURN_IF_ERROR(failure);
    if (steps.size() != steps_to_do) {
      return absl::DeadlineExceededError("the engine did not finish");
    }
  }
  result.steps = std::move(steps);
  result.evaluations = evaluations.results();
  result.master.resize(result.layout.plane_elements);
  for (size_t u = 0; u < result.layout.units.size(); ++u) {
    const model::Unit& unit = result.layout.units[u];
    const hostd::PlaneSpan planes =
        state->planes(static_cast<int>(u), 0, unit.count);
    for (uint64_t i = 0; i < unit.count; ++i) {
      result.master[unit.plane_offset + i] =
          hostd::JoinFloat(planes.hi[i], planes.lo[i]);
    }
  }
  return result;
}

}  // namespace slidedp::testing
