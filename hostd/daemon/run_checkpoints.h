// The checkpoints of one run: when one is due, and its way from a step's
// boundary into a folder. The engine holds every unit at the boundary; rank 0
// makes the files and passes them; they are filled on a thread of their own,
// and each unit is released as soon as it is in them; rank 0 puts the folder in
// place.
//
// A checkpoint that fails is told of, and training goes on.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "common/checkpoint/manifest.h"
#include "common/model/source.h"
#include "hostd/daemon/handover.h"
#include "hostd/daemon/task_thread.h"
#include "hostd/store/host_state.h"
#include "hostd/update/engine.h"
#include "proto/control.pb.h"

namespace slidedp::hostd {

// How a checkpoint ended.
struct CheckpointEnd {
  uint64_t step = 0;
  std::string path;     // empty: it failed
  std::string failure;  // then why
  std::string warning;
  double seconds = 0;
};

class RunCheckpoints {
 public:
  struct Events {
    // Runs a task on the loop thread unless the run is gone by then.
    std::function<void(std::function<void()>)> post;
    // Loop thread.
    std::function<void(const v1::DaemonMessage&)> send;  // to rank 0
    std::function<void()> begun;
    // The thread that writes: records that are out are to be on the disk before
    // the checkpoint that follows them is.
    std::function<void()> sync_records;
    // What the run remembers as of the end of that step; nothing while its
    // record is not out.
    std::function<std::optional<checkpoint::Memory>(uint64_t step)> memory;
    std::function<void(const CheckpointEnd&)> ended;
    // After RequestLast: it has ended, and nothing was released after it.
    std::function<void()> last_ended;
  };
  // What it saves; all is borrowed. `source`: of the output, null if the job
  // has none.
  struct Job {
    HostState* state = nullptr;
    UpdateEngine* engine = nullptr;
    const model::TensorSource* source = nullptr;
    std::shared_ptr<AttachConnection> files;
  };

  RunCheckpoints(const v1::JobSpec& spec, Events events);

  // ---- Engine thread ----
  bool OnBoundary(const Boundary& boundary);

  // ---- Loop thread ----
  void Start(const Job& job, int64_t now_ns);
  // At the next boundary.
  void Request() { wanted_ = true; }
  // The same, and the run is to end with it: last_ended follows. One that is
  // under way will do.
  void RequestLast();
  // All steps are done, `step` of them. True: the boundary after them was to be
  // saved when another save was under way, and now is.
  bool SaveMissed(uint64_t step);
  void Tick(int64_t now_ns);
  // One is under way, or its boundary has been reached.
  bool busy() const { return busy_; }
  // A step's record is out.
  void OnRecord();
  // Of the one that is under way: bytes that are written, and all of them; 0
  // until that is known.
  std::pair<uint64_t, uint64_t> written() const {
    return {written_bytes_, all_bytes_};
  }
  // CheckpointCommitted or CheckpointFailed. False: out of turn.
  bool OnMessage(const v1::WorkerMessage& message);
  // Nothing begins any more, what is under way ends soon.
  void Close();

  // ---- Any thread, after Close() ----
  // Returns when planes and engine are not used any more.
  void Join();

 private:
  enum class Phase { kIdle, kWriting, kCommitting, kDropping };

  void Begin(const Boundary& boundary);
  // On the own thread: receives the files and fills them.
  absl::StatusOr<checkpoint::Manifest> Write(const Boundary& boundary);
  void OnWritten(absl::StatusOr<checkpoint::Manifest> manifest);
  void End(CheckpointEnd end);

  const v1::Checkpoint settings_;
  const checkpoint::Identity sampler_, training_;
  const Events events_;
  Job job_;

  std::atomic<bool> wanted_ = false;
  std::atomic<bool> busy_ = false;
  std::atomic<bool> last_ = false;    // to come, or under way
  std::atomic<bool> closed_ = false;  // also ends writing
  std::atomic<uint64_t> written_bytes_ = 0, all_bytes_ = 0;
  // Loop thread.
  Phase phase_ = Phase::kIdle;
  uint64_t step_ = 0;
  std::string failure_;
  std::optional<checkpoint::Manifest> written_;  // waits for its step's record
  std::optional<Boundary> missed_;  // the last that found another under way
  int64_t begun_ns_ = 0;
  int64_t due_ns_ = 0;  // by every_minutes

  TaskThread thread_;  // last: ends first
};

}  // namespace slidedp::hostd
