// One rank's life, as proto/control.proto tells it: join, accept a plan,
// attach, load, train, write the output, leave.
//
// Four threads, and on rank 0 that of its Checkpoints. The main thread does the
// work, message by message. The control thread reads the daemon's stream: an
// abort or the stream's end ends the process from there, at once, whatever the
// main thread is in the middle of. The watch thread looks at the abort word,
// stores the heartbeat word and sends heartbeats. On a GPU, the device thread
// watches collectives and memory. The first of them that finds a reason to end
// decides the exit code; nothing that the daemon owns needs a clean end of
// ours.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "common/collective/collective.h"
#include "common/device/accelerator.h"
#include "common/device/device.h"
#include "common/model/output.h"
#include "common/model/source.h"
#include "worker/data/mixture.h"
#include "worker/ops/ops.h"
#include "worker/session/attachment.h"
#include "worker/session/checkpoints.h"
#include "worker/session/config.h"
#include "worker/session/control_stream.h"
#include "worker/session/proposal.h"
#include "worker/session/resume.h"
#include "worker/session/scalar_log.h"
#include "worker/session/step_tracer.h"
#include "worker/session/sweeper.h"
#include "worker/step/trainer.h"

namespace slidedp::session {

class Session {
 public:
  // `sweeper` outlives the session; null for ranks other than 0, which write no
  // output.
  Session(const Config& config, Sweeper* sweeper);
  ~Session();

  // Returns when the daemon says Leave. Any other end is an _exit with the code
  // of config.h, from whichever thread sees it first, after a line in the log.
  void Run();

 private:
  // For the daemon to end a stream that we have closed.
  static constexpr int64_t kFarewellNs = 5'000'000'000;

  // Main thread, one per message.
  absl::Status OnPropose(const v1::Propose& propose);
  absl::Status OnAttach(const v1::Attach& attach);
  absl::Status OnStart(uint64_t first_step);
  absl::Status OnOpenOutput();
  absl::Status OnCommitOutput();

  absl::Status OpenDevice();  // before Hello
  bool on_gpu() const { return device_->kind() == device::Kind::kCuda; }

  // Steps of OnAttach.
  // An earlier attempt has put the output in place: the daemon is told.
  absl::StatusOr<bool> OutputIsThere();
  absl::Status PassSource();  // and what to go on from
  absl::Status OpenData();
  absl::Status OpenEvalDataset();
  absl::Status OpenScalarLog();
  absl::Status MakeOps();
  absl::Status JoinCollectives();
  absl::StatusOr<v1::CollectiveIds> MeetOtherRanks();
  absl::Status BuildTrainer();
  absl::Status CheckDeviceMemory();
  absl::Status AwaitSource();
  void MakeCheckpoints();

  step::EvaluationInputs EvaluationInputs();
  // Main thread, while it trains: waits for the daemon's verdict.
  absl::StatusOr<bool> ReportEvaluation(const step::EvaluationPart& part);

  uint64_t DevicePeakBytes();
  void SendTrace();  // steps that are wanted and over
  v1::DaemonMessage NextMessage();
  void Send(const v1::WorkerMessage& message);
  v1::WorkerMessage HelloMessage() const;

  void OnDaemonMessage(const v1::DaemonMessage& message);  // control thread
  void OnStreamEnd(const absl::Status& status);            // control thread
  void Watch();                                            // watch thread
  void WatchDevice();                                      // device thread

  // Reports the failure to the daemon, then ends.
  [[noreturn]] void Fail(const absl::Status& status);
  // Logs `why` and ends the process. The first caller wins; others wait for the
  // end.
  [[noreturn]] void End(ExitCode code, const std::string& why);

  const Config config_;
  Sweeper* const sweeper_;

  // What the daemon's messages lead to, in this order. Destroyed in reverse:
  // the trainer drains its streams before anything that they use goes.
  std::optional<Proposal> proposal_;
  std::optional<Attachment> attachment_;
  std::optional<model::TensorSource> source_;  // rank 0
  std::optional<Resume> resume_;               // rank 0
  std::optional<data::Mixture> data_;
  std::optional<data::Dataset> eval_dataset_;
  std::unique_ptr<device::Device> device_;
  device::AcceleratorInfo gpu_;  // if it is one
  std::unique_ptr<ops::Ops> ops_;
  std::unique_ptr<collective::Collective> param_collective_;
  std::unique_ptr<collective::Collective> grad_collective_;
  // Of GPU ranks; set before the device thread starts.
  std::vector<std::function<absl::Status()>> collective_checks_;
  StepTracer tracer_;
  std::unique_ptr<step::Trainer> trainer_;
  std::unique_ptr<model::OutputFolder> output_;  // rank 0

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::deque<v1::DaemonMessage> messages_;
  std::unique_ptr<ScalarLog> scalar_log_;  // rank 0, if the job wants it
  bool stopping_ = false;                  // the watch thread ends
  bool leaving_ = false;  // Leave or Failed: the stream's end is expected
  bool ending_ = false;   // End has a caller
  // Set once the words are mapped and the trainer is there; read by the watch
  // thread.
  const shm::Mapping* versions_ = nullptr;
  const shm::Mapping* reports_ = nullptr;
  const step::Trainer* watched_trainer_ = nullptr;
  std::unique_ptr<Checkpoints> checkpoints_;  // rank 0; set before Ready
  uint64_t device_peak_bytes_ = 0;

  std::unique_ptr<ControlStream> stream_;
  std::thread watcher_;
  std::thread device_watcher_;
};

}  // namespace slidedp::session
