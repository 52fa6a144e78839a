// The daemon's truth: jobs, their queue, their runs, and who watches them.
// Loop thread only (EventLoop); the constructor and Recover run before the
// loop does.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "hostd/daemon/config.h"
#include "hostd/daemon/event_loop.h"
#include "hostd/daemon/gpus.h"
#include "hostd/daemon/handover.h"
#include "hostd/daemon/job.h"
#include "hostd/daemon/subscription.h"
#include "hostd/daemon/task_thread.h"
#include "hostd/daemon/worker_session.h"
#include "hostd/journal/journal.h"
#include "hostd/launch/launcher.h"
#include "hostd/server/authorize.h"
#include "hostd/server/identity.h"
#include "proto/control.pb.h"

namespace slidedp::hostd {

struct CoreParts {
  EventLoop* loop;
  Journal* journal;
  Config config;
  HostFacts facts;
  uint32_t own_uid = 0;
  std::string version;
  // What the host has now (ReadHostMemory in production).
  std::function<absl::StatusOr<HostMemory>()> memory;
  // Counts the host's GPUs when a job first needs one. May take seconds, so it
  // is called on a thread of its own (ProbeGpus in production).
  std::function<absl::StatusOr<GpuFacts>()> gpus;
};
absl::StatusOr<HostMemory> ReadHostMemory();

class Core {
 public:
  explicit Core(CoreParts parts);
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  // Reads the journal, kills workers that an earlier daemon left, ends its
  // active jobs; pending ones wait for the loop. Then starts the launcher.
  absl::Status Recover();

  // ---- Control service ----
  absl::StatusOr<v1::SubmitReply> Submit(const Identity& identity,
                                         const v1::SubmitRequest& request);
  absl::StatusOr<v1::ListReply> List(const Identity& identity,
                                     const v1::ListRequest& request);
  absl::StatusOr<v1::GetReply> Get(const Identity& identity,
                                   const v1::GetRequest& request);
  absl::StatusOr<v1::CancelReply> Cancel(const Identity& identity,
                                         const v1::CancelRequest& request);
  absl::StatusOr<v1::DrainReply> Drain(const Identity& identity,
                                       const v1::DrainRequest& request);
  absl::StatusOr<v1::CheckpointReply> Checkpoint(
      const Identity& identity, const v1::CheckpointRequest& request);
  absl::StatusOr<v1::DrainReply> Undrain(const Identity& identity);
  v1::VersionReply Version() const;
  // Streams: Write or Finish is called at once or later. The caller reports
  // StreamReady after each write and StreamGone once before it destroys the
  // stream.
  void Watch(const Identity& identity, const v1::WatchRequest& request,
             ReplyStream<v1::WatchReply>* stream);
  void Logs(const Identity& identity, const v1::LogsRequest& request,
            ReplyStream<v1::LogsReply>* stream);
  void Trace(const Identity& identity, const v1::TraceRequest& request,
             ReplyStream<v1::TraceReply>* stream);
  void StreamReady(void* stream);
  void StreamGone(void* stream);

  // ---- Worker service and attach socket ----
  void OnSessionMessage(WorkerSession* session,
                        const v1::WorkerMessage& message);
  void OnSessionEnd(WorkerSession* session);
  void OnAttach(std::shared_ptr<AttachConnection> connection,
                const v1::AttachRequest& request);

  // Everything that depends on time: leases, deadlines, waiting jobs, failed
  // journal writes. Armed by StartTicking, or called by tests.
  void Tick(int64_t now_ns);
  void StartTicking();

  // Refuses new jobs, ends the active ones, finishes every stream; then calls
  // `done`.
  void Stop(std::function<void()> done);

 private:
  // NotFound, or what Authorize says.
  absl::StatusOr<Job*> Reach(const Identity& identity, Verb verb, uint64_t id);
  const Job* FindJob(uint64_t id) const;
  JobRun* FindRun(uint64_t id);
  absl::Status StartLauncher();
  void KillLeftovers();
  absl::Status RecoverJob(Job& job);
  v1::JobInfo Redacted(const Identity& identity, const Job& job) const;

  // ---- The queue (core_queue.cc) ----
  void Schedule();
  // Why the head of the queue may not start now; none if it may.
  std::optional<std::string> WhyWait(const Job& job);
  // Whether GPUs have to be assigned to it.
  static bool TakesGpus(const Job& job);
  void CountGpus();
  void StartRun(Job& job);
  Promised PromisedBytes() const;
  size_t RunCount() const;
  void SetReason(Job& job, const std::string& reason);

  // ---- Changes of a job ----
  // Moves along the state machine, and writes it down with an event.
  void Transition(Job& job, v1::JobState state, const std::string& reason,
                  const std::string& event);
  void AddEvent(Job& job, const std::string& text);
  absl::Status Write(Job& job);
  void Changed(Job& job);
  RunEvents EventsOf(Job& job);
  void OnRecord(Job& job, v1::Record& record);
  void OnEnded(Job& job, v1::JobState state, const std::string& reason,
               bool lost);

  // ---- Checkpoints and restarts (core_checkpoints.cc) ----
  void AddCheckpointEvents(Job& job, RunEvents& events);
  // Spends a retry of the job, if it has one, on going on.
  static bool TakeRetry(Job& job);
  // Saves every running job; `stop`: and puts it back into the queue.
  void SaveRuns(bool stop, shm::AbortReason why, const std::string& reason);
  void ForgetOldJobs();
  void PumpStreams(uint64_t job);
  void FinishStopIfIdle();
  v1::DrainReply DrainState() const;

  EventLoop& loop_;
  Journal& journal_;
  const Config config_;
  const HostFacts facts_;
  const uint32_t own_uid_;
  const std::string version_;
  const std::function<absl::StatusOr<HostMemory>()> memory_;
  const std::function<absl::StatusOr<GpuFacts>()> count_gpus_;
  int64_t started_us_ = 0;
  std::string boot_id_;

  std::map<uint64_t, std::unique_ptr<Job>> jobs_;
  std::map<std::pair<uint32_t, std::string>, uint64_t> by_client_id_;
  DrainRow drain_;
  Gpus gpus_;
  Subscriptions subscriptions_;
  bool stopping_ = false;
  std::function<void()> stop_done_;
  // Posted by the launcher's thread once, not for each piece of output.
  std::shared_ptr<std::atomic<bool>> output_posted_;
  std::unique_ptr<Launcher> launcher_;
  std::optional<TaskThread> gpu_thread_;  // once GPUs are counted
};

}  // namespace slidedp::hostd
