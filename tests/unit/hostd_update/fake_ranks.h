// Ranks that write gradients and words exactly as workers do, without a model:
// what they say each step is given as data. And what the engine must make of
// it, computed with plain loops.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "common/model/tensor_rules.h"
#include "hostd/store/host_state.h"
#include "hostd/update/engine.h"
#include "policy/plan.h"

namespace slidedp::hostd {

struct JobOptions {
  int ranks = 1;
  policy::GradRoute route = policy::GradRoute::kGpuRoot;
  // Of the decoder units, where they differ.
  std::optional<policy::GradRoute> decoder_route;
  policy::UpdateMode mode = policy::UpdateMode::kDeferred;
  uint64_t chunk_bytes = 1024;
  uint64_t own_chunks = 0, ring_chunks = 3;
  int threads = 2;
  bool tied = false;
  uint64_t steps = 5;
  double max_grad_norm = 0.5;  // ignored in eager mode
  // Of the untied embedding table, in each step: rows in a batch, of a hundred.
  // The others have no gradient.
  int used_rows_percent = 100;
  uint64_t slice_elements = 192;
  model::TensorRules rules;
};

// What the ranks say of one step. Gradients are small multiples of 2^-10, so
// that their squares add up exactly in double, whatever the order.
struct StepScript {
  uint64_t valid_tokens = 100;
  std::vector<double> loss_sums;  // per rank
  // [rank][unit]: the rank's own BF16 gradient on route `cpu`; of the other
  // routes, [0][unit] is the reduced gradient.
  std::vector<std::vector<std::vector<bf16>>> gradients;
  // [rank]: shm::Reports::used_rows. Every used row is one rank's at least.
  std::vector<std::vector<uint64_t>> used_rows;
};

// A host state with random weights, and its script.
struct Job {
  explicit Job(const JobOptions& options, uint32_t seed = 1);

  JobOptions options;
  std::unique_ptr<HostState> state;
  UpdateConfig config;
  std::vector<StepScript> script;
  // hi of each version, as a rank must see it in the step's forward pass;
  // empty: not looked at.
  std::vector<std::vector<bf16>> versions;

  policy::GradRoute route(int unit) const;
  // The BF16 values that `rank` drains of [begin, begin + count).
  const bf16* Drained(uint64_t step, int rank, int unit) const;
};

// Weights and moments of one job, as plain arrays over whole planes.
struct Snapshot {
  std::vector<bf16> hi;
  std::vector<int16_t> lo;
  std::vector<uint32_t> m, v;  // bits

  static Snapshot Of(const HostState& state);
  // Writes it into the planes of a state that nobody uses.
  void CopyTo(HostState& state) const;
  bool operator==(const Snapshot&) const = default;
};

// What the engine must end with after `steps` steps of the script.
Snapshot Reference(const Job& job, const Snapshot& start, uint64_t steps);

// Deviations from a proper rank. Each is called where it says and may write to
// the words; a rank whose call returns false says and does nothing more.
struct Deviations {
  // valid_tokens and used_rows are written, begun is not.
  std::function<bool(int rank, uint64_t step)> before_begun;
  // The embedding unit was read; the rest was not, embedded is not written.
  std::function<bool(int rank, uint64_t step)> before_embedded;
  // The chunk is written and not announced.
  std::function<bool(int rank, uint64_t step, uint64_t chunk)> before_chunk;
  // All chunks are announced, the times are not written.
  std::function<bool(int rank, uint64_t step)> before_times;
  int rank_without_times = -1;  // never writes them
};

// A thread per rank, from construction; joined by Join() or the destructor.
class FakeRanks {
 public:
  explicit FakeRanks(Job& job, Deviations deviations = {});
  ~FakeRanks();
  // Ends ranks that wait for something.
  void Abandon() { abandoned_ = true; }
  // All ranks are through their script. False if any was abandoned.
  bool Join();
  // Elements of a version that a rank saw otherwise than Job::versions says.
  uint64_t torn_elements() const { return torn_elements_; }

 private:
  void Run(int rank);
  // False if the rank is to do nothing more.
  bool RunStep(int rank, uint64_t step);
  // Spins until `ready` is true; gives up when abandoned.
  bool Await(const std::function<bool()>& ready);

  Job& job_;
  const Deviations deviations_;
  std::atomic<bool> abandoned_ = false;
  std::atomic<int> finished_ = 0;
  std::atomic<uint64_t> torn_elements_ = 0;
  std::vector<std::thread> threads_;
};

// Runs the engine over the ranks' script; ends at the last result or the
// failure.
struct Outcome {
  std::vector<StepResult> results;
  std::vector<absl::Status> failures;
  uint64_t steps_done = 0;
  uint64_t torn_elements = 0;
};
// Steps from job.config.first_step on. `on_boundary` as the engine's, with the
// engine.
using OnEngineBoundary =
    std::function<bool(UpdateEngine& engine, const Boundary& boundary)>;
Outcome RunJob(Job& job, Deviations deviations = {},
               OnEngineBoundary on_boundary = {});

}  // namespace slidedp::hostd
