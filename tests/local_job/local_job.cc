#include "tests/local_job/local_job.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/base/fd.h"
#include "common/base/status.h"
#include "common/base/units.h"
#include "hostd/store/split.h"

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

absl::Status RunRank(const LocalJobOptions& options,
                     const model::ModelConfig& config,
                     const hostd::HostState& state,
                     const data::Dataset& dataset, int rank) {
  const policy::Plan& plan = state.plan();
  SDP_ASSIGN_OR_RETURN(const RankMappings maps, MapAsWorker(state));
  auto device = device::NewCpuDevice({});
  auto ops = ops::NewCpuOps(plan.compute_threads);
  std::unique_ptr<collective::Collective> collectives[policy::kCommunicators];
  if (plan.ranks > 1) {
    const uint64_t staging = policy::ExchangeStagingBytes(plan);
    const uint64_t bytes = collective::ExchangeBytes(plan.ranks, staging);
    for (int c = 0; c < policy::kCommunicators; ++c) {
      SDP_ASSIGN_OR_RETURN(
          collectives[c], collective::NewShmCollective(
                              *device, maps.exchange.at<char>(c * bytes), bytes,
                              rank, plan.ranks, staging, kDeadlineNs));
    }
  }
  step::TrainerInputs inputs;
  inputs.device = device.get();
  inputs.ops = ops.get();
  inputs.param_collective = collectives[0].get();
  inputs.grad_collective = collectives[1].get();
  inputs.config = &config;
  inputs.layout = &state.layout();
  inputs.plan = &plan;
  inputs.rank = rank;
  inputs.dataset = &dataset;
  inputs.seed = options.seed;
  inputs.batch.ranks = plan.ranks;
  inputs.batch.batch_size = options.problem.batch_size;
  inputs.batch.micro_batch_size = plan.micro_batch_size;
  inputs.batch.micro_batches = plan.micro_batches;
  inputs.params = &maps.params;
  inputs.grads = &maps.grads;
  inputs.versions = &maps.versions;
  inputs.reports = &maps.reports;
  SDP_ASSIGN_OR_RETURN(
      auto trainer,
      step::Trainer::Create(inputs, rank == 0 ? options.hooks : step::Hooks{}));
  return trainer->Run(0, options.steps);
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
  SDP_ASSIGN_OR_RETURN(result.plan, policy::MakePlan(problem));
  result.layout = model::MakeStateLayout(config);
  SDP_ASSIGN_OR_RETURN(auto state, hostd::HostState::Create(
                                       "local", result.layout, result.plan));
  SDP_ASSIGN_OR_RETURN(const model::TensorSource source,
                       model::OpenModelFolder(options.model));
  SDP_RETURN_IF_ERROR(hostd::LoadParameters(source, *state));
  SDP_ASSIGN_OR_RETURN(
      const data::Dataset dataset,
      data::Dataset::Open(options.data, problem.sequence_length, config.vocab));

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
        rank_status[r] = RunRank(options, config, *state, dataset, r);
      });
    }
  }
  for (const absl::Status& status : rank_status) SDP_RETURN_IF_ERROR(status);
  if (engine != nullptr) {
    {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait_for(lock, std::chrono::seconds(60), [&] {
        return steps.size() >= options.steps || !failure.ok();
      });
    }
    engine->Stop();
    SDP_RETURN_IF_ERROR(failure);
    if (steps.size() != options.steps) {
      return absl::DeadlineExceededError("the engine did not finish");
    }
  }
  result.steps = std::move(steps);
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
