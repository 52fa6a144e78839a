// One active job, from the start of its workers to the release of its memory:
// join, plan, hand-over, steps, output, and the end for whatever reason
// (README.md, "life of a run"). Loop thread only; long operations run on the
// run's own thread and come back as tasks of the loop.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/model/source.h"
#include "hostd/daemon/admission.h"
#include "hostd/daemon/config.h"
#include "hostd/daemon/event_loop.h"
#include "hostd/daemon/handover.h"
#include "hostd/daemon/run_checkpoints.h"
#include "hostd/daemon/run_memory.h"
#include "hostd/daemon/spec_check.h"
#include "hostd/daemon/step_measures.h"
#include "hostd/daemon/task_thread.h"
#include "hostd/daemon/trace_collector.h"
#include "hostd/daemon/worker_session.h"
#include "hostd/launch/launcher.h"
#include "hostd/store/host_state.h"
#include "hostd/update/engine.h"

namespace slidedp::hostd {

// What a run is told of its job. The spec has passed CheckSpec.
struct RunJob {
  uint64_t id = 0;
  v1::JobSpec spec;
  CheckedSpec checked;
  uint32_t uid = 0;
  uint32_t gid = 0;
  std::vector<uint32_t> groups;
  std::string user;
  std::string home;
  // The GPUs of its ranks, in rank order; empty if they are not ours to choose.
  std::vector<std::string> gpus;
  // v1::Propose's, of this attempt.
  std::string resume;
  uint32_t attempt = 0;
  bool output_may_be_there = false;
};

// What a run tells. Called on the loop thread; none may destroy the run.
struct RunEvents {
  // RUNNING, COMPLETING, or the same state with other words. `event` is for
  // the job's history; empty: none.
  std::function<void(v1::JobState state, const std::string& reason,
                     const std::string& event)>
      progress;
  // A plan is about to be proposed. An error ends the job.
  std::function<absl::Status(const policy::Plan& plan)> plan;
  std::function<void(uint32_t rank, const Launched& process)> launched;
  // In v1::Record's order; what it adds is told to the user's folder too.
  std::function<void(v1::Record& record)> record;
  // So much of the weights is read, or of a checkpoint written.
  std::function<void(uint64_t done_bytes, uint64_t all_bytes)> moved;
  // As measured a moment ago: PSS of daemon and workers together, and the
  // largest device memory of a rank.
  std::function<void(uint64_t pss_bytes, uint64_t device_bytes)> memory;
  // The state is loaded: so many steps are done already; the best evaluation
  // among them, if there is one.
  std::function<void(uint64_t first_step, const EarlyStop& evaluations)> begun;
  // A checkpoint is under way, or has ended.
  std::function<void()> checkpointing;
  std::function<void(const CheckpointEnd&)> checkpointed;
  // From here on the output may be in place.
  std::function<void()> committing;
  // The workers are gone. COMPLETED, FAILED, CANCELLED, or PENDING: put back by
  // the daemon. `lost`: FAILED because a worker was lost, which another attempt
  // may not meet.
  std::function<void(v1::JobState state, const std::string& reason, bool lost)>
      ended;
  // After `ended`: the memory is free. The run may be destroyed from a later
  // task.
  std::function<void()> released;
};

class JobRun {
 public:
  JobRun(EventLoop& loop, Launcher& launcher, const Config& config, RunJob job,
         RunEvents events);
  // After `released`, or with the launcher stopped.
  ~JobRun();
  JobRun(const JobRun&) = delete;
  JobRun& operator=(const JobRun&) = delete;

  void Start();

  // An error refuses the session; the caller finishes it.
  absl::Status OnHello(WorkerSession* session, const v1::Hello& hello);
  void OnMessage(uint32_t rank, const v1::WorkerMessage& message);
  void OnSessionEnd(uint32_t rank);
  void OnAttach(std::shared_ptr<AttachConnection> connection,
                const v1::AttachRequest& request);
  void OnLaunched(uint32_t rank, const absl::StatusOr<Launched>& launched);
  void OnExit(uint32_t rank, const WorkerExit& exit);
  // Once a second: heartbeat, leases, deadlines.
  void Tick(int64_t now_ns);

  // Not once the output is being put in place.
  bool CanCancel() const {
    return phase_ != Phase::kCommitting && phase_ != Phase::kLeaving;
  }
  // The next `steps` steps, or what is left of the job. One trace at a time.
  absl::StatusOr<std::shared_ptr<TraceCollector>> Trace(uint32_t steps);
  // A checkpoint at the next step. An error if there can be none.
  absl::Status RequestCheckpoint();
  // Saves the job, if it trains, and ends the run as PENDING; a job whose
  // output is being put in place is left alone.
  void PutBack(shm::AbortReason why, const std::string& reason);
  // Whatever the phase.
  void Abort(v1::JobState state, shm::AbortReason why,
             const std::string& reason);

  // Of the demand, what the host has not yet given.
  bool segments_taken() const { return segments_taken_; }
  bool devices_taken() const { return phase_ >= Phase::kStepping; }

 private:
  enum class Phase {
    kJoining,     // waiting for every rank's Hello
    kProposing,   // ... answer to the plan
    kReserving,   // host memory is being reserved
    kLoading,     // attached, weights are loaded, every rank gets Ready
    kStepping,    // until every rank is done and every step applied
    kStopping,    // the engine ends
    kWriting,     // the output's files are filled in
    kCommitting,  // rank 0 renames them into place
    kLeaving,     // it is complete; ranks leave
    kAborting,    // ranks must leave
    kEnded,
  };
  struct Rank {
    WorkerSession* session = nullptr;
    bool joined = false;
    v1::Hello hello;
    std::array<uint8_t, 16> nonce = {};
    bool nonce_good = false;
    bool answered = false;
    std::string refusal;
    bool ready = false;
    bool steps_done = false;
    std::optional<v1::EvalReport> eval;  // of the evaluation under way
    bool process = false;                // started by us and not reaped yet
    int32_t pid = 0;
    int64_t heard_ns = 0;
    // What its heartbeats say; 0: nothing yet.
    uint64_t pss_bytes = 0;
    uint64_t device_peak_bytes = 0;
  };

  void LaunchWorkers();
  std::string LogFileOf(uint32_t rank) const;
  void SayWhoIsMissing();
  void Propose();
  // A plan for the devices that have joined.
  absl::Status PlanForDevices();
  std::string DescribeDevices() const;
  void OnAnswer();
  void Reserve();
  void OnReserved(absl::Status status);
  void OnReady(uint32_t rank, const v1::Ready& ready);
  void OnCollectiveIds(uint32_t rank, const v1::CollectiveIds& ids);
  // Whether GPU ranks have to meet before they can be ready.
  bool NeedsCollectiveIds() const {
    return plan_.device == policy::DeviceKind::kCuda && plan_.ranks > 1;
  }
  // On the run's thread: receives, checks and loads rank 0's files, or makes
  // random weights.
  void LoadSource();
  absl::Status FillRandom(HostState& state) const;
  // The run's thread: rank 0's checkpoint. Nothing if it has none.
  absl::StatusOr<std::optional<checkpoint::Manifest>> Resume(int socket,
                                                             HostState& state);
  void OnLoaded(const absl::Status& status);
  // Reading or writing rank 0's files failed while `doing`.
  void OnFilesFailed(const std::string& doing, const absl::Status& status);
  void OnResumed(const checkpoint::Manifest& manifest);
  void MakeCheckpoints();
  void StartStepsIfReady();
  StepMeasures::Job MeasuredJob() const;
  void OnStep(const StepResult& result);
  // To the core, and to rank 0 if it writes them for TensorBoard.
  void Tell(v1::Record& record);
  void OnEvalReport(uint32_t rank, const v1::EvalReport& report);
  void FinishEvaluation();
  void StopEarly();
  // Steps after which the run is complete.
  uint64_t last_step() const { return stop_step_.value_or(job_.spec.steps()); }
  // For the job's history, while it runs.
  void Notice(const std::string& text);
  // False: too many steps in a row were skipped, the run was ended.
  bool MayGoOn(const StepResult& result);
  void CompleteIfDone();
  void OnEngineStopped();
  void WriteOutput();
  void OnWritten(const absl::Status& status,
                 const std::vector<std::string>& warnings);
  void CommitIfWritten();
  void OnCommitted(const std::string& path);
  // The job is COMPLETED; ranks leave.
  void LeaveComplete(const std::string& event);

  // The first failure of a rank ends the job; `refinable` if the exit of its
  // process will tell more.
  // Another attempt may succeed if it was refinable, or the job trained.
  void FailRank(uint32_t rank, const std::string& what, bool refinable);
  void Unexpected(uint32_t rank, absl::string_view message);
  void SendAll(const v1::DaemonMessage& message);
  void FinishAll(const absl::Status& status);
  void Say(v1::JobState state, const std::string& reason,
           const std::string& event = "");
  // Ends engine and state on the run's thread.
  void TearDown();
  struct Remains {
    std::unique_ptr<HostState> state;
    std::unique_ptr<UpdateEngine> engine;  // destroyed before the state
  };
  void Destroy(Remains remains);
  void StoreHeartbeat();
  // Measures the daemon on the run's thread, where it holds up nobody.
  void MeasureMemory(int64_t now_ns);
  void TellMemory();
  void PressWorkers(int64_t now_ns);
  void EndIfGone();
  bool EveryRank(bool Rank::*flag) const;
  // Runs `task` on the loop unless the run is gone by then.
  void Back(std::function<void(JobRun&)> task);

  EventLoop& loop_;
  Launcher& launcher_;
  const Config& config_;
  const RunJob job_;
  RunEvents events_;

  Phase phase_ = Phase::kJoining;
  v1::JobState state_word_ = v1::CONFIGURING;
  int64_t started_ns_ = 0;
  std::vector<Rank> ranks_;
  policy::Problem problem_;
  policy::Plan plan_;

  // Created and destroyed on the run's thread. In between the loop thread uses
  // the words of `versions` and the segments' descriptors.
  std::unique_ptr<HostState> state_;
  bool segments_taken_ = false;
  bool loaded_ = false;
  LoadProgress load_progress_;
  bool ids_passed_ = false;  // collective ids, to every rank
  // Spans of the update workers' last tasks: some steps of a large model.
  trace::Recorder update_spans_{size_t{1} << 15};
  std::weak_ptr<TraceCollector> trace_;
  // Started on the loop thread, ended on the run's thread.
  std::unique_ptr<UpdateEngine> engine_;
  uint64_t steps_applied_ = 0;
  std::optional<StepMeasures> measures_;  // from the first step on
  RunMemory memory_;
  uint64_t eval_step_ = 0;       // of the evaluation under way, or the last
  uint64_t next_eval_step_ = 0;  // the next one is not before
  std::optional<uint64_t> stop_step_;  // early
  std::string stop_reason_;
  int notices_ = 0;
  // Where the engine begins, and with which memory.
  Boundary begin_ = {};
  checkpoint::Memory begin_memory_;
  // PutBack waits for its checkpoint.
  std::optional<std::pair<shm::AbortReason, std::string>> put_back_;
  uint64_t own_pss_bytes_ = 0;
  int64_t next_pss_ns_ = 0;
  std::shared_ptr<AttachConnection> files_connection_;  // rank 0's
  bool output_opened_ = false;
  bool written_ = false;
  // Set by an abort: reading or writing of weights ends soon.
  std::atomic<bool> stop_files_ = false;
  // The run's thread only.
  std::optional<model::TensorSource> source_;

  // The end.
  v1::JobState end_state_ = v1::FAILED;
  std::string end_reason_;
  std::optional<uint32_t> refinable_rank_;
  int64_t end_began_ns_ = 0;
  std::string end_note_;  // appended to the reason
  bool trained_ = false;  // when the rank failed
  bool lost_ = false;
  bool terminated_ = false;
  bool killed_ = false;
  // Tasks of Destroy that have not come back.
  int destroying_ = 0;
  bool ended_told_ = false;

  // Expires with the run: tasks of other threads that come too late are
  // dropped. Locked on the loop thread only.
  std::shared_ptr<JobRun*> self_;
  // Null: the job has none. Its thread uses what is above.
  std::unique_ptr<RunCheckpoints> checkpoints_;
  TaskThread thread_;  // last: ends first
};

}  // namespace slidedp::hostd
